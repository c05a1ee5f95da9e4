// The panels: each a function of one summary. Whatever a summary lacks is left out.

import { $, age, bytes, count, el, known, plural, say } from "./dom.js";

const STATES = {
  ready: "Serving",
  starting: "Starting",
  down: "Restarting ranks",
  draining: "Shutting down",
  dead: "Stopped",
};
const PLACES = {
  device: "on the device",
  host: "in host memory",
  reading: "being read",
  disk: "on disk",
  failed: "failed to read",
};

export function showHeader(summary) {
  say($("model"), summary.model ?? "");
  document.title = `${summary.model ?? "mstar_tp"} · mstar_tp`;
  const facts = [plural(summary.world_size, "rank"), `up ${age(summary.uptime_s)}`];
  if (summary.version) facts.push(`version ${summary.version}`);
  say($("facts"), facts.join(" · "));
  showHealth(summary.phase, STATES[summary.phase] ?? summary.phase);
}

export function showHealth(state, text) {
  $("health").dataset.state = state;
  say($("health"), text);
}

// ------------------------------------------------------------------ ranks

export function showRanks(summary) {
  const ranks = summary.ranks ?? [];
  say($("ranks-note"), summary.restarts ? `restarted ${plural(summary.restarts, "time")}` : "never restarted");
  const columns = [
    ["Rank", (rank) => String(rank.rank), "header"],
    ["State", (rank) => el("span", { class: `mark ${rank.answered ? "good" : "bad"}` }, rankState(rank, summary))],
    ["Steps", (rank) => count(rank.steps), "number"],
    ["Requests", (rank) => count(rank.requests), "number"],
    ["Memory", (rank) => bytes(rank.process?.resident_bytes), "number"],
    ["Device", (rank) => bytes(rank.process?.device_reserved_bytes), "number", ranks.some((rank) => rank.process?.device_total_bytes)],
  ].filter(([, , , there = true]) => there);
  $("ranks").replaceChildren(table("Ranks", columns, ranks));
}

function rankState(rank, summary) {
  if (rank.answered) return "answers";
  return summary.phase === "ready" ? "silent" : summary.phase === "starting" ? "starting" : "gone";
}

// ------------------------------------------------------------------ slots

export function showSlots(summary) {
  const stages = summary.stages ?? [];
  const all = stages.flatMap((stage) => stage.groups);
  const slots = all.flatMap((group) => group.slots);
  if (!slots.length) {
    const none = summary.adapters?.total === 0 && summary.phase === "ready";
    const text = none ? "No adapters are served." : "The slots show once the ranks answer.";
    $("slots").replaceChildren(el("p", { class: "empty" }, text));
    say($("slots-note"), "");
    return;
  }
  const differ = stages.some((stage) => stage.groups.length > 1);
  const used = stages.map((stage) => stage.groups[0].slots.filter((slot) => slot.adapter !== null).length);
  const total = stages.map((stage) => stage.groups[0].slots.length);
  const filled = `${count(sum(used))} of ${count(sum(total))} filled`;
  say($("slots-note"), differ ? filled : `${filled} · the same on every rank`);
  const parts = stages.flatMap((stage) => [
    stages.length > 1 ? el("h3", {}, stage.stage || "decoder") : null,
    stage.groups.length > 1
      ? el("p", { class: "notice" }, "The ranks' slots differ. They were asked at one place in the order, so this is a fault.")
      : null,
    ...stage.groups.flatMap((group) => [
      stage.groups.length > 1 ? el("h3", { class: "differs" }, `On ${ranksOf(group.ranks)}`) : null,
      el("ul", { class: "slots" }, ...group.slots.map(slotCard)),
    ]),
  ]);
  $("slots").replaceChildren(...parts.filter(Boolean));
}

function slotCard(slot) {
  const state = slot.adapter === null ? "free" : slot.requests ? "busy" : "idle";
  const note = { free: "empty", idle: "kept, unused", busy: plural(slot.requests, "request") }[state];
  return el(
    "li",
    { class: `slot ${state}`, title: slot.adapter },
    el("span", { class: "place" }, el("span", { class: "sr" }, "Slot "), String(slot.slot)),
    el("span", { class: "what" }, el("span", { class: "name" }, slot.adapter ?? "–"), el("span", { class: "muted" }, note)),
  );
}

const ranksOf = (ranks) => `${ranks.length > 1 ? "ranks" : "rank"} ${ranks.join(", ")}`;
const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

// ------------------------------------------------------------------ room

export function showRoom(summary) {
  const answered = (summary.ranks ?? []).filter((rank) => rank.answered);
  const rows = [meter("Requests taken", summary.requests?.live, summary.max_queue, count)];
  rows.push(perRank("KV pages in use", answered, (rank) => [rank.pages_used, rank.pages_total], count));
  rows.push(perRank("KV pages in host memory", answered, ({ kv_host: host }) => [host?.pages_used, host?.pages_total], count));
  const stages = answered[0]?.lora ?? [];
  stages.forEach((stage, i) => {
    const of = stages.length > 1 ? ` of ${stage.stage || "the decoder"}` : "";
    const format = stage.cpu_cache?.unit === "bytes" ? bytes : count;
    const unit = format === bytes ? "" : ", adapters";
    rows.push(perRank(`Slots held${of}`, answered, (rank) => [rank.lora[i]?.slots_held, rank.lora[i]?.slots], count));
    rows.push(
      perRank(`CPU cache${of}${unit}`, answered, ({ lora }) => [lora[i]?.cpu_cache?.used, lora[i]?.cpu_cache?.capacity], format),
    );
  });
  $("room").replaceChildren(...rows.filter(Boolean), roomFacts(answered));
  say($("room-note"), answered.length ? "" : "no rank answers");
}

/** One meter for all ranks, of the fullest. They were not asked at one moment, so they may differ. */
function perRank(label, ranks, read, format) {
  const pairs = ranks.map(read).filter((pair) => pair.every(known));
  if (!pairs.length) return null;
  const [value, limit] = pairs.reduce((most, pair) => (pair[0] * most[1] > most[0] * pair[1] ? pair : most));
  const least = Math.min(...pairs.map(([used]) => used));
  return meter(label, value, limit, format, least < value ? `${format(least)} to ` : "");
}

function meter(label, value, limit, format, least = "") {
  if (!known(value) || !known(limit) || limit <= 0) return null;
  const bar = el("span", { class: "bar" });
  bar.style.width = `${Math.min(100, (100 * value) / limit)}%`;
  const text = `${least}${format(value)} of ${format(limit)}`;
  return el(
    "div",
    { class: "room" },
    el("span", {}, label),
    el("span", { class: "muted" }, text),
    el(
      "div",
      {
        class: value >= 0.9 * limit ? "meter full" : "meter",
        role: "meter",
        "aria-label": label,
        "aria-valuemin": 0,
        "aria-valuemax": limit,
        "aria-valuenow": Math.min(value, limit),
        "aria-valuetext": text,
      },
      bar,
    ),
  );
}

function roomFacts(ranks) {
  const leader = ranks[0] ?? {};
  const stage = leader.lora?.at(-1) ?? {};
  const { tokens_queried: asked, tokens_cached: cached } = leader.prefix ?? {};
  const facts = [
    ["Prompt tokens found in the prefix cache", `${Math.round((100 * cached) / asked)} %`, asked > 0],
    ["Waiting for copies or room", count(leader.waiting)],
    ["Adapter copies in memory", `${bytes(stage.cpu_cache?.memory_bytes)} a rank`, known(stage.cpu_cache?.memory_bytes)],
    ["Slots taken from an adapter", count(stage.evictions), known(stage.evictions)],
    ["Requests that gave pages back", count(leader.preemptions)],
  ].filter(([, , there = true]) => there);
  return el("dl", {}, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

// ------------------------------------------------------------------ adapters

export function showAdapters(summary, search) {
  const { total = 0, matching = 0, shown = [] } = summary.adapters ?? {};
  const said = search ? `${count(matching)} of ${count(total)} match` : plural(total, "adapter");
  say($("adapters-note"), matching > shown.length ? `${said}, ${count(shown.length)} shown` : said);
  if (!shown.length) {
    const text = total ? "No adapter has such a name." : "No adapters are served: start with --lora or load one.";
    $("adapters").replaceChildren(el("p", { class: "empty" }, text));
    return;
  }
  const has = (name) => shown.some((adapter) => known(adapter[name]));
  const columns = [
    ["Name", (adapter) => el("span", { class: "name" }, adapter.name), "header"],
    ["Where", place],
    ["Requests", (adapter) => count(adapter.requests), "number"],
    ["Answered", (adapter) => count(adapter.answered), "number", has("answered")],
    ["Hits", (adapter) => count(adapter.hits), "number", has("hits")],
    ["Evictions", (adapter) => count(adapter.evictions), "number", has("evictions")],
    ["Waiting", (adapter) => count(adapter.waiting), "number", has("waiting")],
    ["Size", (adapter) => bytes(adapter.bytes), "number", has("bytes")],
  ].filter(([, , , there = true]) => there);
  $("adapters").replaceChildren(table("Adapters", columns, shown));
}

function place(adapter) {
  if (!adapter.where) return "–";
  const words = adapter.where === "device" && known(adapter.slot) ? `slot ${adapter.slot}` : PLACES[adapter.where] ?? adapter.where;
  const mark = el("span", { class: `mark ${adapter.where}` }, words);
  return adapter.cause ? el("span", {}, mark, el("span", { class: "cause" }, adapter.cause)) : mark;
}

/** `columns`: heading, cell of a row, and whether cells are numbers or the row's header. */
function table(label, columns, rows) {
  const heads = columns.map(([name, , kind]) => el("th", { scope: "col", class: kind }, name));
  const body = rows.map((row) =>
    el(
      "tr",
      {},
      ...columns.map(([, read, kind]) =>
        kind === "header" ? el("th", { scope: "row" }, read(row)) : el("td", { class: kind }, read(row)),
      ),
    ),
  );
  return el("table", { "aria-label": label }, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...body));
}
