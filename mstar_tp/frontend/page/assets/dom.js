// Elements made of plain text: nothing here, or anywhere in this page, parses markup.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value !== null && value !== undefined && value !== false) {
      node.setAttribute(name, value === true ? "" : String(value));
    }
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function el(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

/** Show `text` in `node`, or hide it when there is none. Touches nothing that stays the same. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
  if (node.hidden !== !text) node.hidden = !text;
}

export const known = (value) => typeof value === "number" && Number.isFinite(value);

export function count(value) {
  if (!known(value)) return "–";
  if (Math.abs(value) >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (Math.abs(value) >= 1e5) return `${Math.round(value / 1e3)}k`;
  return value.toLocaleString("en", { maximumFractionDigits: Math.abs(value) < 10 ? 1 : 0 });
}

export function seconds(value) {
  if (!known(value)) return "–";
  const ms = value * 1e3;
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  return ms < 1000 ? `${Math.round(ms)} ms` : `${value.toFixed(value < 10 ? 2 : 0)} s`;
}

export function bytes(value) {
  if (!known(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value < 10 && unit ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export function age(value) {
  if (!known(value)) return "–";
  const [days, hours, minutes] = [86400, 3600, 60].map((unit) => Math.floor(value / unit));
  if (days) return `${days} d ${hours % 24} h`;
  if (hours) return `${hours} h ${minutes % 60} min`;
  return minutes ? `${minutes} min` : `${Math.floor(value)} s`;
}

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
