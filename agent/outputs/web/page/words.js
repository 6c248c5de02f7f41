// Values as people read them, in their own time zone. Unknown is a dash, never 0.
export const UNKNOWN = "–";

const known = (value, show) => (value === null || value === undefined ? UNKNOWN : show(value));

export const number = (value, digits = 1) =>
  known(value, (v) => v.toLocaleString("en", {maximumFractionDigits: digits}));

// What rounding leaves of a sum that is nothing would have 20 digits, and make a table wider than the screen.
const significant = (value) => (value !== 0 && Math.abs(value) < 1e-6 ? value.toExponential(2)
  : value.toLocaleString("en", {maximumSignificantDigits: 3}));

// A share below 1 is never rounded to 100 %: a promise that was broken once was not kept.
const rounded = (value, text, digits) => (text === "100" && value < 1
  ? number(Math.floor(100 * value * 10 ** digits) / 10 ** digits, digits) : text);

export const milliseconds = (value) =>
  known(value, (v) => (v >= 1000 ? `${significant(v / 1000)} s` : `${number(v, v < 10 ? 2 : 0)} ms`));

export const seconds = (value) => known(value, (v) => milliseconds(1000 * v));

export const percent = (value, digits = 2) => known(value, (v) => `${rounded(v, number(100 * v, digits), digits)} %`);

export const whole_percent = (value) => percent(value, 1);

export const share = (value) => known(value, (v) => `${rounded(v, significant(100 * v), 1)} %`);

export const dollars = (value) => known(value, (v) => `$${Math.abs(v) < 1 ? significant(v)
  : v.toLocaleString("en", {minimumFractionDigits: 2, maximumFractionDigits: 2})}`);

export const bytes = (value) => known(value, (v) => {
  const power = Math.min(4, Math.floor(Math.log2(Math.max(v, 1)) / 10));
  return `${significant(v / 1024 ** power)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
});

export const perSecond = (value, of) => known(value, (v) => `${number(v, v < 10 ? 2 : 0)} ${of}/s`);

// Two bounds as one text, "200–300 ms" or "above 5 s"; `show` writes one value with its unit.
export function between(bounds, show) {
  if (!bounds) return UNKNOWN;
  const {lower, upper} = bounds;
  if (upper === null) return `above ${show(lower)}`;
  if (lower === upper || show(lower) === show(upper)) return show(lower);
  if (lower === 0) return `below ${show(upper)}`;
  const [low, unit] = show(lower).split(" ");
  return show(upper).endsWith(` ${unit}`) ? `${low}–${show(upper)}` : `${show(lower)} – ${show(upper)}`;
}

// A count with its noun, "1 request" or "17 requests".
export const plural = (count, noun) => known(count, (v) => `${number(v)} ${noun}${v === 1 ? "" : "s"}`);

export const words = (name) => name.replaceAll("_", " ");

export const time = (iso) => known(iso, (v) => {
  const at = new Date(v);
  const today = at.toDateString() === new Date().toDateString();
  return today ? at.toLocaleTimeString() : at.toLocaleString();
});

export const ZONE = Intl.DateTimeFormat().resolvedOptions().timeZone;

// A length of time as people say it: 300 is "5 minutes".
export function span(seconds_) {
  // A window that lies on whole seconds may be a little shorter than it was asked to be.
  const [unit, length] = [["day", 86400], ["hour", 3600], ["minute", 60], ["second", 1]]
    .find(([, each]) => seconds_ >= 0.98 * each) ?? ["second", 1];
  const count = Math.round(seconds_ / length);
  return `${count} ${unit}${count === 1 ? "" : "s"}`;
}

// The end of a window's title: "last hour", "last 5 minutes".
export const last = (seconds_) => `last ${span(seconds_).replace(/^1 /, "")}`;

export const time_of_day = (iso) => new Date(iso).toLocaleTimeString([], {hour: "2-digit", minute: "2-digit"});
