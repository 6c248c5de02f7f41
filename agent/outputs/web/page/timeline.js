// Charts of Now on one time axis: verdicts, latencies, load, GPUs, and where a second goes.
import {Chart, times, with_breaks} from "./chart.js";
import {Component, Note, html} from "./elements.js";
import {query} from "./query.js";
import {strictest} from "./tiles.js";
import {milliseconds, number, percent, plural, seconds, share, time, time_of_day, whole_percent, words} from "./words.js";

const per_s = (name) => (step) => (step.covered_s > 0 ? step[name] / step.covered_s : null);

// What of the judged requests had to be met; only if all objectives have one target.
function aimed(objectives) {
  const aims = new Set(objectives.map(({definition}) => definition.target).filter((each) => each != null));
  const [aim] = aims;
  return aims.size === 1 ? aim : null;
}

function Verdicts({steps, objectives, ...shared}) {
  const aim = aimed(objectives);
  const wanted = (step) => (step.covered_s > 0 ? aim * (step.met + step.missed) / step.covered_s : null);
  const of = aim === null ? [] : [wanted];
  return html`<${Chart} ...${shared} label="Requests that met and missed, per second${aim === null ? "" : `; the dashed line is the target, ${percent(aim)}`}"
    data=${with_breaks(steps, shared.step_s, per_s("met"), per_s("missed"), ...of)} stacked
    series=${[{label: "met", colour: "--good"}, {label: "missed", colour: "--bad"},
      ...of.map(() => ({label: "target", colour: "--text", dash: [6, 4], width: 1.5, points: {show: false}}))]} />`;
}

const QUANTILES = {p50: "--three", p95: "--one", p99: "--four"};

function Latency({steps, objectives, key_: key, name, ...shared}) {
  const limit = strictest(objectives, key);
  // A logarithm has no 0.
  const reads = Object.keys(QUANTILES).map((q) => (step) => step[`${key}_ms`][q] || null);
  const known = steps.some((step) => step[`${key}_ms`].p50 !== null);
  return html`<${Chart} ...${shared} label="${name}, logarithmic${limit ? `; the dashed line is the limit, ${seconds(limit.limit_s)} (${limit.name})` : ""}" unit=${milliseconds} log
    why=${`no ${name} was seen in this window`}
    data=${with_breaks(steps, shared.step_s, ...reads, ...(limit && known ? [() => 1000 * limit.limit_s] : []))}
    series=${[...Object.entries(QUANTILES).map(([label, colour]) => ({label, colour})),
      ...(limit && known ? [{label: "limit", colour: "--bad", dash: [6, 4], width: 1.5, points: {show: false}}] : [])]} />`;
}

const Load = ({load, ...shared}) => html`<${Chart} ...${shared} label="Requests in the engines, and the KV cache of the fullest one" unit=${(value) => number(value, 1)} right=${whole_percent}
  why="no engine reports them in this window"
  data=${with_breaks(load, shared.step_s, (step) => step.running, (step) => step.waiting, (step) => step.kv_cache_usage)}
  series=${[{label: "running", colour: "--one"}, {label: "waiting", colour: "--two"},
    {label: "KV cache", colour: "--four", scale: "right", dash: [2, 3]}]} />`;

const PHASES = {queue: "--two", prefill: "--four", decode: "--one", front: "--quiet", network: "--three"};

function Phases({phases, of, name, ...shared}) {
  const {one_in, read, without} = phases;
  const why = read > without ? `one in ${number(one_in)} requests` : read ? "no engine told the phases of these requests" : "no request ended in this window";
  return html`<${Chart} ...${shared} label="${name}${one_in > 1 ? `, a sample: about one in ${number(one_in)} requests` : ""}" unit=${seconds} why=${why} stacked
    data=${with_breaks(phases.items, shared.step_s, ...Object.keys(PHASES).map((phase) => (step) => step[of]?.[`${phase}_s`] ?? null))}
    series=${Object.entries(PHASES).map(([label, colour]) => ({label, colour}))} />`;
}

// One row a GPU, the darker the busier.
const MOST_GPUS = 16;

function Strip({gpu, over: [from, until], step_s}) {
  const known = gpu.items.filter(({busy}) => busy !== null);
  const mean = known.length ? known.reduce((sum, {busy}) => sum + busy, 0) / known.length : null;
  const text = `GPU ${gpu.index}, ${gpu.name}: ${mean === null ? "unknown" : `${share(mean)} busy`}`;
  return html`<span class="name" title=${gpu.gpu}>GPU ${gpu.index}</span>
    <svg viewBox="0 0 ${until - from} 1" preserveAspectRatio="none" role="img" aria-label=${text}><title>${text}</title>
      ${known.map(({at, busy}) => html`<rect x=${Date.parse(at) / 1000 - from} y="0" width=${step_s} height="1" fill-opacity=${0.08 + 0.92 * busy} />`)}</svg>
    <span class="mean">${whole_percent(mean)}</span>`;
}

const Strips = ({gpus, over, step_s}) => (gpus.length === 0 ? null : html`
  <figure class="strips"><figcaption>GPUs, the darker the busier${gpus.length > MOST_GPUS ? `; the first ${MOST_GPUS} of ${gpus.length}` : ""}; the mean at the end</figcaption>
    ${gpus.slice(0, MOST_GPUS).map((gpu) => html`<div><${Strip} gpu=${gpu} over=${over} step_s=${step_s} /></div>`)}</figure>`);

const MOST_EVENTS = 5;

const Events = ({events, address}) => (events.length === 0 ? null : html`
  <p class="marks"><span class="key mark"></span><a href=${address("events")}>${events.length === 1 ? "1 event" : `${events.length} events`}</a>:
    ${" "}${events.slice(0, MOST_EVENTS).map(({at, kind, engine, gpu}) => `${time(at)} ${words(kind).toLowerCase()}${engine ? ` (${engine})` : gpu ? " (GPU)" : ""}`).join(", ")}${events.length > MOST_EVENTS ? ", \u2026" : ""}</p>`);

const MOST_ALERTS = 5;

const spanned = ({fired_from: from, fired_until: until}) => `${from ? time_of_day(from) : "before"} to ${until ? time_of_day(until) : "the end"}`;

// The pages on error budgets that fired, with their runbooks.
function Alerts({alerts: {items, known_from: known}, over: [from]}) {
  const unknown = Date.parse(known) / 1000 > from + 60 ? `Alerts before ${time(known)} are unknown: minutes are no longer kept.` : "";
  if (!items.length) return unknown && html`<${Note}>${unknown}<//>`;
  const runbook = ({alert, objective, model}) => `/runbooks/${alert}.md?${new URLSearchParams({objective, ...(model && {model})})}`;
  return html`<p class="marks"><span class="key fired"></span>${items.length === 1 ? "1 alert" : `${items.length} alerts`}:
    ${" "}${items.slice(0, MOST_ALERTS).map((each, place) => html`${place > 0 && ", "}<a href=${runbook(each)}>${each.rule}</a> ${spanned(each)} (${
      [each.objective, each.model].filter(Boolean).join(", ")})`)}${items.length > MOST_ALERTS ? ", \u2026" : ""} ${unknown}</p>`;
}

// As bands of a chart: Unix seconds from when to when.
const bands_of = ({items}, [from, until]) => items.map(({fired_from: first, fired_until: last}) =>
  [first ? Date.parse(first) / 1000 : from, last ? Date.parse(last) / 1000 : until]);

// These parts are of whole minutes, and cost more than all figures.
const FRESH_MS = 55000;
let kept = {};

const key_of = ({asked, filters}) => JSON.stringify([asked, filters]);

async function read_later(data) {
  const {asked, step} = data;
  const of = key_of(data);
  if (kept.of === of && performance.now() - kept.at < FRESH_MS) return kept.found;
  const stepped = {...asked, step};
  const [phases, load, gpus, alerts] = await Promise.all([
    query("phases", stepped), query("load", stepped), query("gpu_use", stepped), query("alerts", asked)]);
  kept = {of, at: performance.now(), found: {of, phases, load: load.items, gpus: gpus.items, alerts}};
  return kept.found;
}

const Later = ({shared, found, problem}) => {
  if (problem) return html`<p class="quiet">No load and no phases: ${problem}</p>`;
  if (!found) return html`<p class="quiet">Reading load and phases.</p>`;
  return html`
    <div class="two"><${Load} ...${shared} load=${found.load} /><${Strips} ...${shared} gpus=${found.gpus} /></div>
    <h3>Where the time of a request goes</h3>
    <div class="two">
      <${Phases} ...${shared} phases=${found.phases} of="median" name="Around the median, the middle fifth" />
      <${Phases} ...${shared} phases=${found.phases} of="slowest" name="The slowest 5 %" />
    </div>
    ${found.phases.without > 0 && html`<${Note}>${plural(found.phases.without, "request")} of ${number(found.phases.read)} have no phases: no engine told them.<//>`}`;
};

export class Timeline extends Component {
  state = {found: null, problem: null};

  componentDidMount() { this.read(); }

  componentDidUpdate({data}) { if (data !== this.props.data) this.read(); }

  componentWillUnmount() { this.is_gone = true; }

  // What needs more queries comes after the figures: these decide whether to look on at all.
  async read() {
    const {data} = this.props;
    try {
      const found = await read_later(data);
      // A slower answer to an earlier question is not shown.
      if (!this.is_gone && data === this.props.data) this.setState({found, problem: null});
    } catch (error) {
      if (!this.is_gone) this.setState({problem: error.message});
    }
  }

  render({data, address}, {found, problem}) {
    const {steps, objectives, events, over_chart: over, step_s} = data;
    const is_old = !problem && found?.of !== key_of(data);
    const shared = {over, step_s, marks: times(events), bands: found && !is_old ? bands_of(found.alerts, over) : []};
    return html`
      <h2>By ${data.step_name}, ${data.over}</h2>
      <${Verdicts} ...${shared} steps=${steps} objectives=${objectives} />
      <${Events} events=${events} address=${address} />
      ${found && !is_old && html`<${Alerts} alerts=${found.alerts} over=${over} />`}
      <div class="two">
        <${Latency} ...${shared} steps=${steps} objectives=${objectives} key_="ttft" name="TTFT" />
        <${Latency} ...${shared} steps=${steps} objectives=${objectives} key_="tpot" name="TPOT" />
      </div>
      <div aria-busy=${is_old}><${Later} shared=${shared} found=${found} problem=${problem} /></div>`;
  }
}
