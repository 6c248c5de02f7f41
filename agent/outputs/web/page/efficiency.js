// The view of efficiency: MFU and MBU over time, and where prefill and decode are under the roofline.
import {Chart, times} from "./chart.js";
import {Figures, Table, html} from "./elements.js";
import {query} from "./query.js";
import {number, share, span} from "./words.js";

const STEPS = {"5m": "1m", "1h": "1m", "6h": "10m", "24h": "1h", "7d": "6h"};
const PHASES = {prefill: "Prefill", decode: "Decode", busy: "All busy time"};
const SOURCES = {requests: "by the requests", engine: "by the engine", hardware: "by the hardware"};

async function load({window = "1h"}) {
  const [summary, series] = await Promise.all([
    query("summary", {window}), query("efficiency", {window, step: STEPS[window]})]);
  return {summary, steps: series.items};
}

const phase = (efficiency) => ([key, name]) => {
  const use = efficiency[key];
  return [name, share(use?.mfu ?? null), share(use?.mbu ?? null), number(use?.flops_per_byte ?? null),
    share(use?.roofline_share ?? null), use?.bound ?? "–", {text: use?.actions[0] ?? "", kind: "text"}];
};

const disagreement = ({figure, higher, lower, times: by, causes}) => [
  figure.toUpperCase(), higher, lower, by === null ? "infinite, as that is 0" : number(by, 2), {text: causes[0], kind: "text"},
];

// The roof in FLOP/s over FLOPs per byte, and the phases as points under it.
function roofline(efficiency) {
  const found = Object.entries(PHASES).map(([key, name]) => [name, efficiency[key]])
    .filter(([, use]) => use?.flops_per_byte && use.mfu && use.ridge_flops_per_byte);
  if (!found.length) return null;
  const [, {achieved_flops_per_s: achieved, mfu, ridge_flops_per_byte: ridge}] = found[0];
  const peak = achieved / mfu;
  const corners = [0.1, ridge, 10 * ridge];
  const x = [...new Set([...corners, ...found.map(([, use]) => use.flops_per_byte)])].sort((a, b) => a - b);
  const roof = x.map((each) => Math.min(peak, peak * each / ridge));
  const points = found.map(([, use]) => x.map((each) => (each === use.flops_per_byte ? use.achieved_flops_per_s : null)));
  return {names: found.map(([name]) => name), data: [x, roof, ...points]};
}

function Roofline({efficiency}) {
  const found = roofline(efficiency);
  if (!found) return html`<p class="quiet">No roofline: the model or the GPU's peak is unknown.</p>`;
  const colours = ["--four", "--one", "--three"];
  const label = "Roofline: FLOP/s over FLOPs per byte, both logarithmic";
  return html`<${Chart} label=${label} data=${found.data}
    scales=${{x: {time: false, distr: 3}, y: {distr: 3}}} x=${{label: "FLOPs per byte"}}
    axes=${[{}, {size: 70, values: (_, ticks) => ticks.map((tick) => tick?.toExponential(0) ?? "")}]}
    series=${[{label: "roof", colour: "--quiet"}, ...found.names.map((name, place) => ({
      label: name, colour: colours[place], width: 0, points: {show: true, size: 11}}))]} />`;
}

const counted = ({prefix_cache: cache, speculation: drafts}) => [
  ["Prefix cache hits", share(cache?.hit_ratio ?? null), cache ? "of looked up tokens" : "no engine counts them"],
  ["Drafts accepted", share(drafts?.acceptance_rate ?? null),
    drafts ? `${number(drafts.mean_accepted_length, 2)} tokens a step` : "no engine counts drafts"],
];

function Show({data: {summary, steps}}) {
  const {efficiency} = summary;
  const over = `last ${span(summary.window_s)}`;
  if (!efficiency) return html`<h2>Efficiency, ${over}</h2><p>Unknown: no minute of this window is booked yet.
    The first is booked about half a minute after it is over.</p>`;
  const sources = Object.entries(SOURCES).filter(([key]) => efficiency.sources[key]);
  const of_source = (key, figure) => steps.map((s) => s.efficiency.sources[key]?.[figure] ?? null);
  const lines = (figure) => ({
    data: [times(steps), ...sources.map(([key]) => of_source(key, figure))],
    series: sources.map(([, name], place) => ({label: name, colour: ["--one", "--two", "--three"][place]})),
  });
  return html`
    <h2>Efficiency, ${over}</h2>
    <${Figures} label="Model FLOPs and memory bandwidth utilisation" of=${sources.map(([key, name]) => [
      `MFU / MBU ${name}`, `${share(efficiency.sources[key].mfu)} / ${share(efficiency.sources[key].mbu)}`,
      key === "hardware" ? "measured" : "estimated"]).concat(counted(efficiency))} />
    <div class="two">
      <${Chart} label="MFU by step, ${over}" ...${lines("mfu")} />
      <${Chart} label="MBU by step, ${over}" ...${lines("mbu")} />
    </div>
    <${Roofline} efficiency=${efficiency} />
    <${Table} label="Phases, over the time in which they went on, ${over}"
      head=${["phase", "MFU", "MBU", "FLOPs/byte", "of the roofline", "bound", "what helps"]} words=${["bound", "what helps"]}
      rows=${Object.entries(PHASES).map(phase(efficiency))} />
    <${Table} label="Where sources disagree, newest minute" head=${["figure", "higher", "lower", "times", "likely"]}
      words=${["higher", "lower", "likely"]}
      rows=${efficiency.disagreements.map(disagreement)} empty="They agree." />`;
}

export const efficiency = {title: "Efficiency", window: "1h", load, Show};
