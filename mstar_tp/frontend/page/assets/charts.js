// What the page has seen of the last ten minutes, and lines drawn of it.

import { $, count, el, known, seconds, svg } from "./dom.js";

const KEPT_S = 600;
const SPANS_S = [60, 120, 300, KEPT_S];
const RATE_OVER_S = 4; // a rate is taken over this long, so that one step more or less hardly shows
const LATENCY_OVER_S = 30;
const EDGE = { top: 8, right: 6, bottom: 20, left: 46 };

/** Samples, oldest first. `took` of each is this page's clock, in seconds. */
export class History {
  samples = [];

  add(summary, took) {
    const last = this.samples.at(-1);
    // Counters of a server that was started anew begin at 0: what came before is no base for them.
    if (last && summary.uptime_s < last.uptime) this.samples.length = 0;
    const leader = (summary.ranks ?? [])[0] ?? {};
    const sample = {
      took,
      uptime: summary.uptime_s,
      made: summary.requests?.generated_tokens,
      latency: summary.latency ?? {},
      running: leader.answered ? leader.running : null,
      waiting: leader.answered ? leader.waiting : null,
    };
    const before = this.since(took - RATE_OVER_S);
    const passed = before ? sample.uptime - before.uptime : 0;
    sample.tokens = passed > 0 ? (sample.made - before.made) / passed : null;
    const base = this.since(took - LATENCY_OVER_S);
    for (const kind of ["first", "between"]) {
      for (const percent of [50, 95]) {
        sample[`${kind}${percent}`] = quantile(base?.latency[kind], sample.latency[kind], percent / 100);
      }
    }
    this.samples.push(sample);
    while (this.samples[0].took < took - KEPT_S) this.samples.shift();
    return sample;
  }

  /** The server did not answer: the lines have a gap there. */
  miss(took) {
    if (this.samples.length) this.samples.push({ ...this.samples.at(-1), ...GAP, took });
  }

  /** The newest sample that is not younger than `took`, else the oldest. */
  since(took) {
    return this.samples.findLast((sample) => sample.took <= took) ?? this.samples[0];
  }
}

const GAP = Object.fromEntries(
  ["running", "waiting", "tokens", "first50", "first95", "between50", "between95"].map((name) => [name, null]),
);

/** A quantile of what a histogram counted between two looks at it. Its counts are one a bucket; the
 * last is for what is past the last bound. */
export function quantile(before, now, share) {
  if (!now?.bounds?.length) return null;
  const counts = now.counts.map((number, i) => number - (before?.counts[i] ?? 0));
  const total = counts.reduce((sum, number) => sum + number, 0);
  if (!(total > 0)) return null;
  let left = share * total;
  const i = counts.findIndex((number) => (left -= number) <= 0);
  if (i < 0 || i >= now.bounds.length) return now.bounds.at(-1); // at least that
  const low = i ? now.bounds[i - 1] : 0;
  return low + (now.bounds[i] - low) * (1 + left / counts[i]);
}

/** One figure: a title, the values of now, and a line for each of `series` ({name, label}). */
export class Chart {
  constructor(id, { title, series, format, empty }) {
    this.series = series;
    this.format = format;
    this.title = title;
    this.values = series.map(() => el("strong", {}, "–"));
    this.when = el("span", { class: "muted when" });
    const legend = series.map(({ label }, i) =>
      el("span", { class: `key s${i}` }, this.values[i], label ? ` ${label}` : ""),
    );
    this.svg = svg("svg", { role: "img", width: "100%" });
    this.empty = el("p", { class: "empty over" }, empty);
    const caption = el("figcaption", {}, el("h2", {}, title), el("div", { class: "legend" }, ...legend), this.when);
    $(id).append(caption, el("div", { class: "plot" }, this.svg, this.empty));
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.draw()).observe(this.svg);
    this.samples = [];
    this.pointer = null;
  }

  show(samples) {
    this.samples = samples;
    this.draw();
  }

  point(x) {
    this.pointer = x;
    this.draw();
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.svg;
    if (!width) return;
    const { samples } = this;
    const now = samples.at(-1)?.took ?? 0;
    const seen = now - (samples[0]?.took ?? 0);
    const span = SPANS_S.find((length) => seen <= length) ?? KEPT_S;
    const [left, right] = [EDGE.left, width - EDGE.right];
    const [top, bottom] = [EDGE.top, height - EDGE.bottom];
    const values = samples.flatMap((sample) => this.series.map(({ name }) => sample[name])).filter(known);
    const peak = nice(Math.max(...values, this.format === seconds ? 0.002 : 2));
    const x = (took) => right - ((now - took) / span) * (right - left);
    const y = (value) => bottom - (value / peak) * (bottom - top);
    const parts = [0, 0.5, 1].flatMap((share) => [
      svg("line", { class: "grid", x1: left, x2: right, y1: y(peak * share), y2: y(peak * share) }),
      svg("text", { x: left - 6, y: y(peak * share) + 4, "text-anchor": "end" }, values.length ? this.format(peak * share) : ""),
    ]);
    parts.push(
      svg("text", { x: left, y: height - 4 }, span >= 120 ? `${span / 60} min ago` : `${span} s ago`),
      svg("text", { x: right, y: height - 4, "text-anchor": "end" }, "now"),
    );
    this.series.forEach(({ name }, i) => {
      const d = path(samples, (sample) => x(sample.took), (sample) => (known(sample[name]) ? y(sample[name]) : null));
      if (i === 0 && d.area) parts.push(svg("path", { class: "area", d: d.area(bottom) }));
      parts.push(svg("path", { class: `line s${i}`, d: d.line }));
    });
    const picked = this.pick(x);
    if (picked) {
      const at = x(picked.took);
      parts.push(svg("line", { class: "cursor", x1: at, x2: at, y1: top, y2: bottom }));
      this.series.forEach(({ name }, i) => {
        if (known(picked[name])) parts.push(svg("circle", { class: `dot s${i}`, cx: at, cy: y(picked[name]), r: 3.5 }));
      });
    }
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(...parts);
    this.tell(picked ?? samples.at(-1), picked ? now - picked.took : null);
    this.empty.hidden = values.length > 0;
    this.svg.setAttribute("aria-label", this.words(values));
  }

  pick(x) {
    if (this.pointer === null) return null;
    const far = (sample) => Math.abs(x(sample.took) - this.pointer);
    return this.samples.reduce((best, sample) => (best && far(best) <= far(sample) ? best : sample), null);
  }

  tell(sample, ago) {
    this.series.forEach(({ name }, i) => {
      this.values[i].textContent = this.format(sample?.[name]);
    });
    this.when.textContent = ago === null ? "" : `${Math.round(ago)} s ago`;
  }

  words(values) {
    if (!values.length) return `${this.title}: nothing yet`;
    const last = this.samples.at(-1);
    const now = this.series.map(({ name, label }) => `${label || "now"} ${this.format(last[name])}`);
    return `${this.title}: ${now.join(", ")}; at most ${this.format(Math.max(...values))} in the time shown`;
  }
}

export const FORMATS = { count, seconds };

function nice(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 6, 8, 10].find((step) => value <= step * unit) * unit;
}

function path(samples, x, y) {
  const runs = [];
  let run = null;
  for (const sample of samples) {
    const at = y(sample);
    if (at === null) {
      run = null;
      continue;
    }
    if (!run) runs.push((run = []));
    run.push([x(sample).toFixed(1), at.toFixed(1)]);
  }
  const line = runs.map((points) => `M${points.map((point) => point.join(" ")).join("L")}`).join("");
  const area = (floor) =>
    runs
      .map((points) => `M${points[0][0]} ${floor}L${points.map((p) => p.join(" ")).join("L")}L${points.at(-1)[0]} ${floor}Z`)
      .join("");
  return { line, area: runs.length ? area : null };
}
