// The time that a view shows: the last while, or a range of the past.
import {query} from "./query.js";
import {last} from "./words.js";

export const WINDOWS = {
  "5m": "5 minutes", "15m": "15 minutes", "1h": "hour", "6h": "6 hours", "24h": "day", "7d": "7 days", "30d": "30 days",
};
const STEPS = {"5m": "1m", "15m": "1m", "1h": "1m", "6h": "10m", "24h": "1h", "7d": "6h", "30d": "1d"};
const STEP_NAMES = {
  "1m": [60, "minute"], "5m": [300, "5 minutes"], "10m": [600, "10 minutes"], "30m": [1800, "30 minutes"],
  "1h": [3600, "hour"], "6h": [21600, "6 hours"], "1d": [86400, "day"],
};
const MOST_STEPS = 75;
const HOUR_S = 3600;
const UNITS_S = {s: 1, m: 60, h: HOUR_S, d: 86400, w: 604800};

export const length_of = (text) => Number.parseFloat(text) * UNITS_S[text.at(-1)];

// Unix milliseconds of a moment as the API takes it: ISO 8601, now, or as in now-2h; NaN of another text.
function moment(text) {
  const [, count, unit] = /^now(?:-([\d.]+)([smhdw]))?$/.exec(text) ?? [];
  if (text === "now" || count) return Date.now() - 1000 * (count ?? 0) * (UNITS_S[unit] ?? 0);
  return Date.parse(text);
}

// The shortest step of a range of which the agent still has sums, and that makes a readable chart.
function step_of({grid_s: grid, window_s: length}) {
  const fits = ([, [step]]) => step >= grid && length / step <= MOST_STEPS;
  return (Object.entries(STEP_NAMES).find(fits) ?? ["1d"])[0];
}

const day = (at) => at.toLocaleDateString([], {month: "short", day: "numeric"});
const minute = (at) => at.toLocaleTimeString([], {hour: "2-digit", minute: "2-digit"});

// "28 Nov 02:10 to 02:40", in the reader's time zone.
function between(from, until) {
  const [first, then] = [new Date(from), new Date(until)];
  const same = first.toDateString() === then.toDateString();
  return `${day(first)} ${minute(first)} to ${same ? "" : `${day(then)} `}${minute(then)}`;
}

// What of the address says it; the range wins.
export const range_of = ({from, until}) => (from ? {from, until} : null);

// `asked` are the parameters of a query, `told` the summary if it had to be read for them. `name` is the end of a title, of the response's own bounds.
export async function period(parameters, usual = "1h") {
  const range = range_of(parameters);
  const {window = usual} = parameters;
  const told = range && await query("summary", range);
  const step = range ? step_of(told) : STEPS[window];
  const [step_s, step_name] = STEP_NAMES[step];
  const name = ({window_from: from, window_until: until, window_s: length}) => (range ? between(from, until) : last(length));
  const length_s = range ? told.window_s : length_of(window);
  return {asked: range ?? {window}, told, length_s, step, step_s, step_name, name, is_range: range !== null};
}

// The parameters of the period of the same length before this one.
export function before({from, until}, length_s) {
  if (!from) return {from: `now-${2 * length_s}s`, until: `now-${length_s}s`};
  const [end, begin] = [moment(from), moment(from) - 1000 * length_s];
  return {from: new Date(begin).toISOString(), until: new Date(end).toISOString()};
}

// A field of a form is in the reader's time zone, and may be empty.
export const iso = (text) => (Number.isNaN(Date.parse(text)) ? "" : new Date(text).toISOString());

export function field(text) {
  const at = new Date(moment(text ?? ""));
  if (Number.isNaN(at.getTime())) return "";
  return new Date(at - at.getTimezoneOffset() * 60000).toISOString().slice(0, 16);
}
