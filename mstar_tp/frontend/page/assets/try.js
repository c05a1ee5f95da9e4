// The try-it box: one request at a time through the real API, its tokens shown as they come.

import { $, el, plural, say, seconds } from "./dom.js";

const ENDS = { stop: "it came to its end", length: "max tokens reached", tool_calls: "it calls a tool" };
const KEPT_KEY = "mstar-tp.api-key";

export class TryBox {
  /** `statusKey()`: the key that shows the server's state, tried where no other was given. */
  constructor(statusKey, suggest) {
    this.statusKey = statusKey;
    this.running = null;
    this.offered = "";
    $("try-key").value = sessionStorage.getItem(KEPT_KEY) ?? "";
    $("try-key-field").hidden = !$("try-key").value;
    $("try-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("try-stop").addEventListener("click", () => this.running?.abort());
    $("try-prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("try-form").requestSubmit();
    });
    $("try-model").addEventListener("input", () => suggest($("try-model").value));
  }

  /** Offer the base and these adapters; the base stands in the field until somebody types. */
  offer(summary, adapters) {
    if (!$("try-model").value && document.activeElement !== $("try-model")) {
      $("try-model").value = summary.model ?? "";
      $("try-kind").value = summary.chats === false ? "text" : "chat";
    }
    const names = [summary.model, ...adapters.map((adapter) => adapter.name)].filter(Boolean);
    const offered = JSON.stringify(names);
    if (offered === this.offered) return;
    this.offered = offered;
    $("try-models").replaceChildren(...names.map((name) => el("option", { value: name })));
  }

  async send() {
    if (this.running) return;
    this.running = new AbortController();
    this.begin();
    const told = { tokens: 0, first: null, end: null, start: performance.now() };
    try {
      for await (const event of this.events()) this.take(event, told);
      say($("try-status"), summarize(told));
    } catch (error) {
      const stopped = error.name === "AbortError";
      say($("try-status"), stopped ? `Stopped. ${summarize(told)}` : told.tokens ? summarize(told) : "");
      if (!stopped) say($("try-error"), sentence(error));
    } finally {
      this.running = null;
      this.end();
    }
  }

  begin() {
    say($("try-error"), "");
    say($("try-status"), "Waiting for the first token");
    $("try-answer").replaceChildren();
    $("try-answer").setAttribute("aria-busy", "true");
    $("try-stop").hidden = false;
    if (document.activeElement === $("try-send")) $("try-stop").focus();
    $("try-send").disabled = true;
  }

  end() {
    $("try-answer").setAttribute("aria-busy", "false");
    $("try-send").disabled = false;
    if (document.activeElement === $("try-stop")) $("try-send").focus();
    $("try-stop").hidden = true;
  }

  request() {
    const chat = $("try-kind").value === "chat";
    const prompt = $("try-prompt").value;
    const body = {
      model: $("try-model").value,
      ...(chat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
      temperature: $("try-temperature").valueAsNumber,
      max_tokens: $("try-tokens").valueAsNumber,
      stream: true,
      stream_options: { include_usage: true },
    };
    return [chat ? "v1/chat/completions" : "v1/completions", body];
  }

  async *events() {
    const [path, body] = this.request();
    const own = $("try-key-field").hidden ? "" : $("try-key").value.trim();
    if (own) sessionStorage.setItem(KEPT_KEY, own);
    const key = own || this.statusKey();
    const response = await fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) },
      body: JSON.stringify(body),
      signal: this.running.signal,
    });
    if (!response.ok) throw await refusal(response);
    yield* dataLines(response.body.pipeThrough(new TextDecoderStream()).getReader());
  }

  take(data, told) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Refusal(event.error.message);
    const choice = event.choices?.[0];
    const text = choice?.delta?.content ?? choice?.text ?? "";
    if (text) {
      told.first ??= performance.now();
      told.tokens += 1;
      $("try-answer").append(text);
      $("try-answer").scrollTop = $("try-answer").scrollHeight;
      say($("try-status"), "Writing");
    }
    told.end = choice?.finish_reason ?? told.end;
    if (event.usage) told.tokens = event.usage.completion_tokens;
  }
}

/** What the server said against the request, in its own sentence. */
class Refusal extends Error {}

async function refusal(response) {
  if (response.status === 401) {
    $("try-key-field").hidden = false;
    $("try-key").focus();
    return new Refusal("This server asks for an API key, and has not taken the one it was given, if any.");
  }
  const body = await response.json().catch(() => null);
  return new Refusal(body?.error?.message ?? `The server answered ${response.status} ${response.statusText}.`);
}

function sentence(error) {
  if (!(error instanceof Refusal)) return "The server broke off, or cannot be reached. Try again once it answers.";
  const text = String(error.message);
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}

function summarize(told) {
  if (told.first === null) return told.end ? "The answer is empty." : "";
  const now = performance.now();
  const wrote = (now - told.first) / 1e3;
  const parts = [
    `${plural(told.tokens, "token")} in ${seconds((now - told.start) / 1e3)}`,
    `first after ${seconds((told.first - told.start) / 1e3)}`,
  ];
  if (told.tokens > 2 && wrote > 0.25) parts.push(`${((told.tokens - 1) / wrote).toFixed(0)} tokens/s`);
  if (told.end) parts.push(ENDS[told.end] ?? told.end);
  return `${parts.join(", ")}.`;
}

/** The data of each server-sent event. */
async function* dataLines(reader) {
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6).trim();
  }
}
