// The four figures that say how it goes: each with its limit, its trend, and the change against the period before.
import {html} from "./elements.js";
import {UNKNOWN, between, dollars, milliseconds, number, perSecond, percent, seconds, share, span, whole_percent} from "./words.js";

const WIDTH = 100;
const HEIGHT = 28;

// A line without axes; steps of which nothing is known are breaks.
function Trend({values, kind}) {
  const known = values.filter((value) => value != null);
  if (known.length < 2) return html`<svg class="trend" aria-hidden="true"></svg>`;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const x = (place) => (WIDTH * place) / (values.length - 1);
  // What differs by rounding alone is a level line.
  const range = Math.max(high - low, 0.01 * high) || 1;
  const y = (value) => HEIGHT - 2 - ((HEIGHT - 4) * (value - low)) / range;
  const path = values.map((value, place) => (value == null ? "" : `${place && values[place - 1] != null ? "L" : "M"}${x(place)} ${y(value)}`)).join(" ");
  return html`<svg class="trend ${kind}" viewBox="0 0 ${WIDTH} ${HEIGHT}" preserveAspectRatio="none" aria-hidden="true"><path d=${path} /></svg>`;
}

// Relative, or in points of a share. `is_good` is whether more is better; null if neither is.
function Change({now, earlier, length_s, is_good, points = false}) {
  const before = `${span(length_s).replace(/^1 /, "")} before`;
  if (now == null || earlier == null || (!points && earlier === 0)) return html`<span class="change quiet">${earlier == null ? `no figures of the ${before}` : "\u00a0"}</span>`;
  const change = points ? now - earlier : now / earlier - 1;
  const text = `${number(100 * Math.abs(change), Math.abs(change) < 0.1 ? 1 : 0)} ${points ? "points" : "%"}`;
  if (text.startsWith("0 ")) return html`<span class="change quiet">as in the ${before}</span>`;
  const kind = is_good === null ? "quiet" : (change > 0) === is_good ? "up" : "down";
  return html`<span class="change"><span class=${kind}>${change > 0 ? "\u2191" : "\u2193"} ${text}</span> <span class="quiet">against the ${before}</span></span>`;
}

const Tile = ({name, value, more, kind = "", values, href, ...change}) => html`
  <div class="tile ${kind}"><dt>${href ? html`<a href=${href}>${name}</a>` : name}</dt><dd class="value">${value}</dd>
    <dd>${more}</dd><dd><${Trend} values=${values} kind=${kind} /></dd><dd><${Change} ...${change} /></dd></div>`;

const judged = ({met, missed}) => (met + missed ? met / (met + missed) : null);

// An objective of several agents has one budget.
const one_of_each = (objectives) => [...new Map(objectives.map((each) => [each.name, each])).values()];

const budgets = (objectives) => one_of_each(objectives).filter(({budget}) => budget.left !== null).slice(0, 2)
  .map(({name, budget}, _, all) => `${all.length > 1 ? `${name}: ` : ""}${left(budget)}`).join("; ");

// Below 0 more than the whole budget is used.
const left = ({left: part}) => (part >= 0 ? `${share(part)} of the error budget left` : `${number(1 - part, 1)} times the error budget is used`);

const targets = (objectives) => [...new Set(objectives.map(({definition}) => definition.target).filter((each) => each != null))];

function attainment({summary, objectives, steps, earlier}) {
  const aims = targets(objectives);
  const now = summary.attainment ?? judged(summary);
  const counted = summary.engine_counts?.attainment ?? [];
  const aim = aims.length ? `target ${aims.map((each) => percent(each)).join(", ")}` : "no objective is set";
  const bounds = now === null && counted.length === 1 ? between(counted[0], whole_percent) : null;
  const rest = now === null && bounds === null ? "unknown: no request was judged" : budgets(objectives);
  return {name: "Attainment", value: bounds ?? percent(now), more: [aim, rest].filter(Boolean).join("; "),
    kind: now === null || !aims.length ? "" : now >= Math.max(...aims) ? "good" : now < Math.min(...aims) ? "bad" : "",
    values: steps.map(judged), now, earlier: earlier && judged(earlier), is_good: true, points: true};
}

// The strictest of the limits on a latency, with its objective; null without any.
export const strictest = (objectives, key) => objectives.filter(({definition}) => definition[`${key}_s`] != null)
  .map(({name, definition}) => ({name, limit_s: definition[`${key}_s`]})).sort((one, other) => one.limit_s - other.limit_s)[0] ?? null;

function ttft({summary, objectives, steps, earlier}) {
  const limit = strictest(objectives, "ttft");
  const now = summary.ttft_ms.p95;
  const counted = summary.engine_counts?.latencies_ms.ttft?.p95;
  const text = limit ? `limit ${seconds(limit.limit_s)} (${limit.name})` : "no objective limits it";
  return {name: "TTFT p95", value: now === null && counted ? between(counted, milliseconds) : milliseconds(now),
    more: now === null && !counted ? `unknown: no first token was seen; ${text}` : text,
    kind: now === null || !limit ? "" : now <= 1000 * limit.limit_s ? "good" : "bad",
    values: steps.map((step) => step.ttft_ms.p95), now, earlier: earlier?.ttft_ms.p95, is_good: false};
}

function goodput({summary, steps, earlier}) {
  const counted = summary.engine_counts;
  const per_request = (value) => perSecond(value, "req");
  const all = summary.throughput_rps ?? counted?.throughput_rps ?? null;
  return {name: "Goodput", value: summary.goodput_rps === null && counted?.goodput_rps ? between(counted.goodput_rps, per_request) : per_request(summary.goodput_rps),
    more: all === null ? "unknown: requests are not seen" : `of ${per_request(all)} without an error`,
    values: steps.map((step) => step.goodput_rps), now: summary.goodput_rps, earlier: earlier?.goodput_rps, is_good: true};
}

function cost({summary, priced, earlier, filters}) {
  const per = ({cost: of}) => of?.usd_per_million_tokens_within_objective ?? null;
  const hidden = filters.some(([kind]) => kind === "tenant" || kind === "objective");
  const now = summary.cost?.usd_per_hour ?? null;
  const good = per(summary) === null ? "" : `${dollars(per(summary))} per 1M output tokens in time`;
  return {name: "Cost per hour", value: dollars(now),
    more: now !== null ? good || "of all engines together" : hidden ? "unknown: GPUs work for all requests at once" : "unknown: no minute has a price and a number of GPUs",
    values: priced.map((step) => step.cost?.usd_per_hour ?? null), now, earlier: earlier?.cost?.usd_per_hour, is_good: null};
}

export function Tiles({data, summary, address}) {
  const given = {...data, summary};
  const length_s = summary.window_s;
  return html`
    <dl class="tiles" aria-label="The state in four figures">
      <${Tile} ...${attainment(given)} length_s=${length_s} href=${address("breakdown", {sort: "-missed", by: "tenant"})} />
      <${Tile} ...${ttft(given)} length_s=${length_s} href=${address("requests", {worst: "ttft"})} />
      <${Tile} ...${goodput(given)} length_s=${length_s} />
      <${Tile} ...${cost(given)} length_s=${length_s} href=${address("cost")} />
    </dl>`;
}
