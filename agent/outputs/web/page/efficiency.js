// The view of efficiency: MFU and MBU over time, and where prefill and decode are under the roofline.
import {Chart, over_window, with_breaks} from "./chart.js";
import {CountedTime, Figures, Reasons, Table, html} from "./elements.js";
import {Pays} from "./pays.js";
import {period} from "./period.js";
import {Pools} from "./pools.js";
import {query} from "./query.js";
import {number, share, whole_percent} from "./words.js";

const PHASES = {prefill: "Prefill", decode: "Decode", busy: "All busy time"};
const TERA = 1e12;
const SOURCES = {requests: "by the requests", counters: "by the engine's token counters", engine: "by the engine", hardware: "by the hardware"};

async function load(parameters) {
  const {asked, step, step_name, step_s, name} = await period(parameters);
  const [summary, series, pools] = await Promise.all([
    query("summary", asked), query("efficiency", {...asked, step}), query("pools", asked)]);
  return {summary, steps: series.items, pools: pools.items, step: step_name, step_s, over: name(summary)};
}

const phase = (efficiency) => ([key, name]) => {
  const use = efficiency[key];
  return [name, share(use?.mfu ?? null), share(use?.mbu ?? null), number(use?.flops_per_byte ?? null),
    share(use?.roofline_share ?? null), use?.bound ?? "–", {text: use?.actions[0] ?? "", kind: "text"}];
};

// The widest of all engines, for each pair of sources.
const widest = (found) => Object.values(Object.groupBy(found, ({figure, higher, lower}) => `${figure} ${higher} ${lower}`))
  .map((alike) => alike.reduce((one, other) => (other.times === null || (one.times ?? Infinity) < other.times ? other : one)));

const disagreement = ({figure, higher, lower, times: by, causes}) => [
  figure.toUpperCase(), higher, lower, by === null ? "infinite, as that is 0" : number(by, 2), {text: causes[0] ?? "", kind: "text"},
];

// The roof in TFLOP/s over FLOPs per byte, and the phases as points under it.
function roofline(efficiency) {
  const found = Object.entries(PHASES).map(([key, name]) => [name, efficiency[key]])
    .filter(([, use]) => use?.flops_per_byte && use.mfu && use.ridge_flops_per_byte);
  if (!found.length) return null;
  const [, {achieved_flops_per_s: achieved, mfu, ridge_flops_per_byte: ridge}] = found[0];
  const peak = achieved / mfu;
  const corners = [0.1, ridge, 10 * ridge];
  const x = [...new Set([...corners, ...found.map(([, use]) => use.flops_per_byte)])].sort((a, b) => a - b);
  const roof = x.map((each) => Math.min(peak, peak * each / ridge) / TERA);
  const points = found.map(([, use]) => x.map((each) => (
    each === use.flops_per_byte ? use.achieved_flops_per_s / TERA : null)));
  return {names: found.map(([name]) => name), data: [x, roof, ...points]};
}

function Roofline({efficiency}) {
  const found = roofline(efficiency);
  if (!found) return html`<p>No roofline: the model or the GPU's peak is unknown.</p>`;
  const colours = ["--four", "--one", "--three"];
  const label = "Roofline: TFLOP/s over FLOPs per byte, both logarithmic";
  return html`<${Chart} label=${label} data=${found.data}
    scales=${{x: {time: false, distr: 3}, y: {distr: 3}}} legend=${{live: false}}
    axes=${[{label: "FLOPs per byte", size: 32, labelSize: 22}, {label: "TFLOP/s", size: 60,
      values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick, 3)))}]}
    series=${[{label: "roof", colour: "--quiet", points: {show: false}}, ...found.names.map((name, index) => ({
      label: name, colour: colours[index], width: 0, points: {show: true, size: 11}}))]} />`;
}

const WHY_NOT = {
  requests: "no request has a row, or the model or the GPU's peak is unknown",
  counters: "no engine counted tokens, or the model or the GPU's peak is unknown",
  engine: "the engine does not estimate its work: start vLLM with --enable-mfu-metrics",
  hardware: "no GPU counters: NVML's GPM or dcgm-exporter gives them",
};

function source(efficiency, key, name) {
  const {mfu, mbu} = efficiency.sources[key];
  const why = mfu === null || mbu === null ? `: ${WHY_NOT[key]}` : "";
  const how = key === "hardware" ? "measured" : "estimated";
  return [`MFU / MBU ${name}`, `${share(mfu)} / ${share(mbu)}`, why ? `unknown${why}` : how];
}

const phases_without = (efficiency) => Object.entries(PHASES)
  .filter(([key]) => efficiency[key]?.mfu == null)
  .map(([, name]) => [name, "no work of it was counted, or the model or the GPU's peak is unknown"]);

// Why the shares of a batch are unknown.
const NO_LIMIT = "unknown: the engine's command line is not seen: set engines[].limits, or neither was counted";
const LONG_STEPS = "unknown: no limit is known, or prompts take several steps";

const counted = ({prefix_cache: cache, speculation: drafts, batch_fill: fill}) => [
  ["Batch fill, requests", share(fill?.requests ?? null),
    fill?.requests == null ? NO_LIMIT : "running requests over the most that may run, with idle time"],
  ["Batch fill, tokens", share(fill?.tokens ?? null),
    fill?.tokens == null ? LONG_STEPS : "estimated: tokens of a step over the most that it may compute"],
  ["Prefix cache hits", share(cache?.hit_ratio ?? null), cache ? "of looked up tokens" : "unknown: no engine counts them"],
  ["Drafts accepted", share(drafts?.acceptance_rate ?? null),
    drafts ? `${number(drafts.mean_accepted_length, 2)} tokens a step` : "unknown: no engine counts drafts"],
];

function Use({summary, steps, step, step_s, over}) {
  const {efficiency} = summary;
  if (!efficiency) return html`<h2>Efficiency, ${over}</h2><p>Unknown: no minute of this window is stored yet.
    The first is stored about half a minute after it is over.</p>`;
  const sources = Object.entries(SOURCES).filter(([key]) => efficiency.sources[key]);
  const over_chart = over_window(summary);
  const of_source = (figure) => ([key]) => (s) => s.efficiency.sources[key]?.[figure] ?? null;
  const fill = (of) => (s) => s.efficiency.batch_fill?.[of] ?? null;
  const lines = (figure) => ({
    over: over_chart, data: with_breaks(steps, step_s, ...sources.map(of_source(figure))),
    series: sources.map(([, name], index) => ({label: name, colour: ["--one", "--four", "--two", "--three"][index]})),
  });
  return html`
    <h2>Efficiency, ${over}</h2>
    <${Figures} label="Model FLOPs and memory bandwidth utilisation" of=${sources.map(([key, name]) => source(efficiency, key, name))
        .concat(counted(efficiency))} />
    <div class="two">
      <${Chart} label="MFU by ${step}, ${over}" unit=${whole_percent} ...${lines("mfu")} />
      <${Chart} label="MBU by ${step}, ${over}" unit=${whole_percent} ...${lines("mbu")} />
    </div>
    <${Chart} label="Batch fill by ${step}, ${over}" unit=${whole_percent} over=${over_chart}
      data=${with_breaks(steps, step_s, fill("requests"), fill("tokens"))}
      series=${[{label: "requests", colour: "--one"}, {label: "tokens of a step (estimated)", colour: "--two"}]} />
    <${Roofline} efficiency=${efficiency} />
    <${Table} label="Phases, over the time in which they went on, ${over}"
      head=${["phase", "MFU", "MBU", "FLOPs/byte", "of the roofline", "bound", "what helps"]} words=${["bound", "what helps"]}
      rows=${Object.entries(PHASES).map(phase(efficiency))} />
    <${Reasons} of=${phases_without(efficiency)} />
    <${Table} label="Where sources disagree by more than their margin, newest minute, widest of all engines" head=${["figure", "higher", "lower", "times", "likely"]}
      words=${["higher", "lower", "likely"]}
      rows=${widest(efficiency.disagreements).map(disagreement)} empty="They agree." />
    <${CountedTime} of=${efficiency} />`;
}

const Show = ({data, address}) => html`
  <${Use} ...${data} />
  <${Pays} savings=${data.summary.engine_counts?.savings} over=${data.over} address=${address} />
  <${Pools} models=${data.pools} over=${data.over} address=${address} />`;

export const efficiency = {title: "Efficiency", window: "1h", load, Show,
  ignores: ["tenant", "objective"], why: "GPUs work for all requests at once"};
