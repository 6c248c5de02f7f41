// The state of the window in one sentence, and whether it is good, bad or unknown. Only figures decide:
// nothing here reads a clock or the page.
import {between, number, percent, plural, time_of_day, whole_percent, words} from "./words.js";

const kept_by = (count) => (count === 1 ? "its promise" : "their promise");

// "of tenant acme and engine chat-0"
const chosen = (filters) => (filters.length ? ` of ${filters.map(([kind, name]) => `${kind} ${name}`).join(" and ")}` : "");

// The step in which more than half of the requests of the window missed that missed at all; null without one.
function peak(steps, missed) {
  const worst = steps.reduce((most, each) => (each.missed > (most?.missed ?? 0) ? each : most), null);
  return missed > 1 && steps.length > 1 && worst !== null && worst.missed > missed / 2 ? worst.at : null;
}

// The cause of the most requests, and how many; null if none is explained.
function main_cause(causes) {
  const counted = causes.filter(({requests}) => requests > 0);
  return counted.length ? counted.reduce((most, each) => (each.requests > most.requests ? each : most)) : null;
}

const first_clause = (text) => text.split(/[:;.] |\.$/)[0].replaceAll("`", "");
const lower = (text) => text.charAt(0).toLowerCase() + text.slice(1);

function because({missed, explained, cause_details: causes}, steps) {
  const at = peak(steps, missed);
  const when = at === null ? "" : `, most of them at ${time_of_day(at)}`;
  const cause = main_cause(causes);
  if (cause === null) return `${when}; ${explained ? "their causes are unknown" : missed === 1 ? "its cause is not known yet" : "their causes are not known yet"}`;
  const of_them = cause.requests === missed ? (missed === 1 ? "" : ", all") : `, ${number(cause.requests, 0)} of them`;
  if (cause.cause === "unexplained") return `${when}${of_them || ","} without a known cause`;
  const remedy = cause.advice ? `: ${lower(first_clause(cause.advice.remedy))}` : "";
  return `${when}${of_them || ","} because of ${words(cause.cause)}${remedy}`;
}

const open = ({undetermined}) => (undetermined ? `; ${plural(undetermined, "request")} could not be judged` : "");

function judged_by_one({objective, met, missed, attainment}, summary, target, steps, of) {
  const all = met + missed;
  const whose = `${objective} ${all === 1 ? "request" : "requests"}${of}`;
  const kept = missed === 0 ? (all === 1 ? `The only ${whose} kept its promise` : `All ${number(all, 0)} ${whose} kept their promise`)
    : met === 0 ? (all === 1 ? `The only ${whose} missed its promise` : `None of ${number(all, 0)} ${whose} kept its promise`)
      : `${percent(attainment)} of ${number(all, 0)} ${whose} kept ${kept_by(2)}`;
  const aim = target === null ? "" : ` (target ${percent(target)})`;
  const why = missed === 0 ? "" : `${met === 0 && missed === all ? "" : `; ${number(missed, 0)} missed`}${because({...summary, missed}, steps)}`;
  return {text: `${kept}${aim}${why}${open(summary)}.`, kind: state_of(attainment, target)};
}

const state_of = (attainment, target) => (target === null ? "" : attainment >= target ? "good" : "bad");

const listed = (names) => (names.length < 2 ? names.join("") : `${names.slice(0, -1).join(", ")} and ${names.at(-1)}`);

// Of several objectives those that are below their target are named, with the main cause of all misses.
function judged_by_several(judged, summary, targets, steps, of) {
  const figure = ({objective, attainment}) => `${objective} ${percent(attainment)}${targets[objective] == null ? "" : ` (target ${percent(targets[objective])})`}`;
  const below = judged.filter(({objective, attainment}) => targets[objective] != null && attainment < targets[objective]);
  const known = judged.filter(({objective}) => targets[objective] != null);
  const met = `${percent(summary.met / (summary.met + summary.missed))} of ${plural(summary.met + summary.missed, "request")}${of} kept every promise`;
  const why = summary.missed ? `; ${number(summary.missed, 0)} missed${because(summary, steps)}` : "";
  const state = below.length ? `Below target: ${listed(below.map(figure))}`
    : known.length ? `Above target: ${listed(judged.map(figure))}` : listed(judged.map(figure));
  return {text: `${state}. ${met}${why}${open(summary)}.`, kind: below.length ? "bad" : known.length ? "good" : ""};
}

// No request has a row: what the engines counted, if they did.
function without_rows({engine_counts: counted}, engines, targets, over, of) {
  const bounded = counted?.attainment ?? [];
  if (bounded.length) {
    const texts = bounded.map(({objective, ...bounds}) => `${between(bounds, whole_percent)} of ${objective} requests`);
    const below = bounded.some(({objective, upper}) => targets[objective] != null && upper < targets[objective]);
    const above = bounded.every(({objective, lower: least}) => targets[objective] != null && least >= targets[objective]);
    return {text: `${listed(texts)} kept their promise, by the engines' histograms; no single request is seen.`, kind: below ? "bad" : above ? "good" : ""};
  }
  const busy = engines.reduce((sum, {running}) => sum + (running ?? 0), 0);
  if (busy > 0) return {text: `Engines run ${plural(busy, "request")}, of which the agent sees none: no plugin, span or proxy shows them.`, kind: "bad"};
  if (counted?.requests > 0) return {text: `Engines counted ${plural(counted.requests, "request")} ${over}, of which the agent sees none.`, kind: "bad"};
  return {text: `No request${of} ended ${over}.`, kind: ""};
}

// `over` is as in "in the last hour"; `steps` are those of the time series, `targets` by objective,
// `filters` pairs of a kind and a name.
export function sentence({summary, objectives, engines, steps, over, filters}) {
  const of = chosen(filters.filter(([kind]) => kind !== "objective"));
  const targets = Object.fromEntries(objectives.map(({name, definition}) => [name, definition.target]));
  const {requests, by_objective: all} = summary;
  if (requests === 0) return without_rows(summary, engines, targets, over, of);
  const judged = all.filter(({met, missed}) => met + missed > 0);
  if (judged.length === 1) return judged_by_one(judged[0], summary, targets[judged[0].objective] ?? null, steps, of);
  if (judged.length > 1) return judged_by_several(judged, summary, targets, steps, of);
  const ended = `${plural(requests, "request")}${of} ended ${over}`;
  if (all.some(({undetermined}) => undetermined > 0)) return {text: `${ended}, and whether ${requests === 1 ? "it" : "they"} kept ${kept_by(requests)} is unknown: what is needed to judge was not seen.`, kind: ""};
  return objectives.length ? {text: `${ended}; no objective covers ${requests === 1 ? "it" : "them"}.`, kind: ""}
    : {text: `${ended}. No objective is set, so nothing says whether ${requests === 1 ? "it was" : "they were"} fast enough.`, kind: ""};
}
