// What the agent watches now: engines, GPUs and agents.
import {Note, Reasons, Table, html, named, only} from "./elements.js";
import {Starts} from "./starts.js";
import {UNKNOWN, bytes, number, share, span, time, words} from "./words.js";

const COLOURS = {ok: "up", idle: "up", saturated: "slow", loading: "slow", paused: "slow"};
const HAS_ENDED = ["stalled", "dead"];

// An engine of an agent that does not tell its state is up or down.
const reached = ({up, problem}) => (up === null ? {text: `unknown: ${problem}`, kind: "quiet"}
  : up ? {text: "up", kind: "up"} : {text: problem ? `down: ${problem}` : "down", kind: "down"});

// The state that the probes of the engine report, since when, and why.
function probed({state, state_detail: detail, state_why: why, state_since: since, problem}) {
  const kind = COLOURS[state] ?? "down";
  if (kind === "up") return {text: state, kind};
  // The event that ended it says more than that it does not answer.
  const cause = HAS_ENDED.includes(state) && why ? words(why) : problem ?? detail;
  return {text: `${state} since ${time(since)}: ${cause}`, kind};
}

function state_of({ejected, ...of}) {
  const {text, kind} = of.state ? probed(of) : reached(of);
  return ejected ? {text: `${text}; gets no new requests: ${ejected}`, kind: "down"} : {text, kind};
}

const ENGINE_FIELDS = {model: "model", running: "running", waiting: "waiting", kv_cache_usage: "KV cache"};
const unreported = (engines) => Object.entries(ENGINE_FIELDS)
  .filter(([key]) => engines.some((each) => each[key] == null))
  .map(([, name]) => [name, "an engine cannot be reached, or does not report it"]);

const SKEWS = {requests: "requests", running: "running", waiting: "waiting", kv_cache_usage: "KV cache", step_time: "step"};
// The alert on uneven ranks fires above this.
const UNEVEN = 1.5;
const skewed = (ratio) => (ratio > UNEVEN ? {text: number(ratio, 2), kind: "missed"} : number(ratio, 2));

function Skew({engines, address}) {
  const uneven = engines.filter(({rank_skew: skew}) => skew);
  return uneven.length > 0 && html`
    <${Table} label="Skew of data-parallel ranks: the highest over the mean, last 5 minutes" head=${["engine", ...Object.values(SKEWS)]} pairs
      rows=${uneven.map(({name, rank_skew: skew}) => [only(address, "now", "engine", name), ...Object.keys(SKEWS).map((key) => skewed(skew[key]))])} />
    <${Note}>1 is even; with N ranks, N is everything on one. <a href="/docs/skew.md">Uneven ranks</a>.<//>`;
}

const GPU_FIELDS = {
  gpu_utilization_ratio: "busy", gpu_memory_used_bytes: "memory used", gpu_memory_total_bytes: "memory",
  gpu_power_watts: "power",
};
const unmeasured = (gpus) => Object.entries(GPU_FIELDS)
  .filter(([key]) => gpus.some(({facts}) => facts[key] == null))
  .map(([, name]) => [name, "the GPU's driver does not report it"]);

const unpublished = (agents) => (agents.some(({waiting_rows: waiting}) => waiting === null)
  ? [["waiting and lag", "an agent without storage.publish_to keeps its rows in its file alone"]] : []);

const ago = (length) => (length === null ? UNKNOWN : `${span(length)} ago`);

// How old a sample is now, in seconds; null if that is unknown.
const age_of = (live, {age_s: age}) => (age === null ? null : age + (Date.now() - live.heardAt) / 1000);

const is_known = (each) => each.age_s !== null && each.stale_after_s !== null;

export const is_fresh = (live, each) => is_known(each) && age_of(live, each) <= each.stale_after_s;

// A row of the past is grey, and says how old it is in place of a state of now.
const dated = (live, each, state, cells) => {
  if (!is_known(each) || is_fresh(live, each)) return cells(state);
  return cells(`old: read ${ago(age_of(live, each))}`).map((cell) => ({text: cell?.text ?? cell, kind: "old"}));
};

// Agents may give their engines the same name.
const engine = (live) => {
  const several = new Set(live.engines.map(({agent: name}) => name)).size > 1;
  return ({running, waiting, kv_cache_usage: usage, ...of}) => dated(live, of, state_of(of), (state) => [
    only(live.address, "now", "engine", of.name, several && ` (${of.agent})`), state, only(live.address, "now", "model", of.model),
    number(running), number(waiting), share(usage), time(of.read_at),
  ]);
};

const gpu = (live) => ({gpu: uuid, index, name, problem, facts, at, ...of}) => dated(live, of, problem ?? "ok", (state) => [
  `${index}: ${name}`, state, share(facts.gpu_utilization_ratio ?? null),
  bytes(facts.gpu_memory_used_bytes), bytes(facts.gpu_memory_total_bytes),
  facts.gpu_power_watts == null ? "–" : `${number(facts.gpu_power_watts, 0)} W`, time(at), named(uuid),
]);

const lives = ({overdue, stopped_at: stopped}) => (stopped ? {text: "stopped", kind: "quiet"}
  : overdue === null ? {text: "unknown", kind: "quiet"}
    : overdue ? {text: "overdue", kind: "down"} : {text: "running", kind: "up"});

export const has_ended = ({stopped_at: stopped, overdue}) => Boolean(stopped || overdue);

const agent = ({lag_s: lag, waiting_rows: waiting, ...of}) => [
  named(of.name), lives(of), of.version ?? UNKNOWN, time(of.started_at), ago(of.silent_s),
  number(waiting, 0), lag === null ? UNKNOWN : span(lag),
];

export function Fleet({live: figures, starts, is_range, address}) {
  if (is_range) return html`<${Note}>Engines, GPUs and agents are shown live, not of the past.<//>`;
  const live = {...figures, address};
  const {engines, gpus, agents} = live;
  return html`
    <h2>Engines</h2>
    <${Table} label="Engines at their last sample"
      head=${["engine", "state", "model", "running", "waiting", "KV cache", "read at"]} words=${["state", "model"]} pairs
      rows=${engines.map(engine(live))}
      empty=${agents.length && agents.every(has_ended) ? "No agent runs, so no engine is watched." : "No engine is configured or was found."} />
    <${Reasons} of=${unreported(engines)} />
    <${Skew} engines=${engines.filter((each) => is_fresh(live, each))} address=${address} />
    <${Starts} of=${starts} address=${address} />
    <h2>GPUs</h2>
    <${Table} label="GPUs at their newest sample" rows=${gpus.map(gpu(live))}
      head=${["GPU", "state", "busy", "memory used", "memory", "power", "read at", "UUID"]} words=${["state", "UUID"]} pairs
      empty="No GPU was read: there is none here, or NVML is not available." />
    <${Reasons} of=${unmeasured(gpus)} />
    <h2>Agents</h2>
    <${Table} label="Agents that write to this database" rows=${agents.map(agent)}
      head=${["agent", "state", "version", "started", "last seen", "waiting to be published", "lag"]}
      words=${["state", "version"]} pairs empty="No agent has written to this database." />
    <${Reasons} of=${unpublished(agents)} />`;
}
