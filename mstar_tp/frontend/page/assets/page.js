// Asks for the summary again and again, and shows what it says, or that nothing is said.

import { Chart, FORMATS, History } from "./charts.js";
import { $, say } from "./dom.js";
import { showAdapters, showHeader, showHealth, showRanks, showRoom, showSlots } from "./panels.js";
import { TryBox } from "./try.js";

const KEPT_KEY = "mstar-tp.key";
const ANSWER_WITHIN_MS = 10_000;
const asked = Number(new URLSearchParams(location.search).get("every_ms"));
const EVERY_MS = asked >= 100 && asked <= 60_000 ? asked : 2_000;

const history = new History();
const charts = [
  new Chart("chart-tokens", {
    title: "Tokens a second",
    series: [{ name: "tokens", label: "" }],
    format: FORMATS.count,
    empty: "Nothing measured yet",
  }),
  new Chart("chart-requests", {
    title: "Requests",
    series: [{ name: "running", label: "running" }, { name: "waiting", label: "waiting" }],
    format: FORMATS.count,
    empty: "No rank has answered yet",
  }),
  new Chart("chart-first", {
    title: "Time to first token",
    series: [{ name: "first50", label: "p50" }, { name: "first95", label: "p95" }],
    format: FORMATS.seconds,
    empty: "No first tokens in this time",
  }),
  new Chart("chart-between", {
    title: "Between tokens",
    series: [{ name: "between50", label: "p50" }, { name: "between95", label: "p95" }],
    format: FORMATS.seconds,
    empty: "No tokens in this time",
  }),
];

let key = sessionStorage.getItem(KEPT_KEY) ?? "";
let heard = null; // when the last answer came
let wake = () => {};
const box = new TryBox(() => key, suggest);

class KeyNeeded extends Error {}

async function ask(query) {
  const response = await fetch(`debug/summary?${new URLSearchParams(query)}`, {
    headers: key ? { Authorization: `Bearer ${key}` } : {},
    cache: "no-store",
    signal: AbortSignal.timeout(ANSWER_WITHIN_MS),
  });
  if (response.status === 401 || response.status === 403) throw new KeyNeeded();
  if (!response.ok) throw new Error(`status ${response.status}`);
  return response.json();
}

function show(summary, search) {
  heard = new Date();
  document.body.classList.remove("stale");
  $("key-form").hidden = true;
  say($("notice"), summary.reason ? notice(summary.reason) : "");
  history.add(summary, performance.now() / 1e3);
  showHeader(summary);
  showRanks(summary);
  showSlots(summary);
  showRoom(summary);
  showAdapters(summary, search);
  for (const chart of charts) chart.show(history.samples);
  if (!search) box.offer(summary, summary.adapters?.shown ?? []);
}

const notice = (reason) => `${reason.charAt(0).toUpperCase()}${reason.slice(1)}.`;

function showNothing(error) {
  document.body.classList.add("stale");
  if (error instanceof KeyNeeded) {
    if ($("key-form").hidden) {
      $("key-form").hidden = false;
      $("key").focus();
    }
    showHealth("waiting", "Key needed");
    say($("notice"), key ? "The server has not taken this key." : "");
    return;
  }
  history.miss(performance.now() / 1e3);
  showHealth("dead", "No answer");
  const last = heard ? ` It was last heard from at ${heard.toLocaleTimeString()}.` : "";
  say($("notice"), `The server does not answer: it is stopped or cannot be reached.${last} This page keeps asking.`);
}

async function poll() {
  for (;;) {
    const search = $("search").value.trim();
    try {
      show(await ask({ search }), search);
    } catch (error) {
      showNothing(error);
    }
    await new Promise((resolve) => {
      wake = resolve;
      setTimeout(resolve, EVERY_MS);
    });
  }
}

/** Names for the try-it box beyond those that the table shows. */
async function suggest(text) {
  try {
    const summary = await ask({ search: text.trim() });
    box.offer(summary, summary.adapters?.shown ?? []);
  } catch {
    // The next poll says why; any name can be typed.
  }
}

$("search").addEventListener("input", () => wake());
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  sessionStorage.setItem(KEPT_KEY, key);
  $("key").value = "";
  wake();
});

poll();
