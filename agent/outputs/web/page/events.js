// The view of events: what broke, with its evidence.
import {Chart, finished, over_steps, times} from "./chart.js";
import {Table, html, named, only} from "./elements.js";
import {period} from "./period.js";
import {query} from "./query.js";
import {bytes, number, percent, seconds, time, words} from "./words.js";

async function load(parameters) {
  const {asked, step, step_name, name} = await period(parameters);
  const [summary, found, series] = await Promise.all([query("summary", asked),
    query("events", {...asked, limit: 50, cursor: parameters.cursor}), query("timeseries", {...asked, step})]);
  return {found, steps: finished(series.items), over_chart: over_steps(series.items), over: name(summary), step: step_name};
}

const moment = (seconds) => time(new Date(1000 * seconds).toISOString());

function value(name, each) {
  if (typeof each === "object") return JSON.stringify(each);
  if (typeof each !== "number") return String(each);
  const [, show] = UNITS.find(([unit]) => unit.test(name)) ?? [null, (plain) => number(plain, 3)];
  return show(each);
}

// How a number is shown, by the end of its name.
const UNITS = [[/_at$/, moment], [/_s$/, seconds], [/_bytes$/, bytes], [/_usage$/, percent]];

const evidence = (facts) => Object.entries(facts).filter(([, each]) => each !== null)
  .map(([name, each]) => `${words(name.replace(/_(s|bytes)$/, ""))}: ${value(name, each)}`).join("; ");

const Show = ({data: {found, steps, over_chart, over, step}, parameters, address}) => html`
  <h2>Events</h2>
  <${Chart} label="Goodput and throughput by ${step}, ${over}, in requests per second; a dashed line is an event of the list" over=${over_chart}
    data=${[times(steps), steps.map((s) => s.goodput_rps), steps.map((s) => s.throughput_rps)]}
    marks=${times(found.items)}
    series=${[{label: "goodput", colour: "--one"}, {label: "throughput", colour: "--two"}]} />
  <${Table} label="Events, ${over}, the newest first" head=${["when", "what", "engine", "GPU", "confidence", "evidence"]}
    words=${["what", "engine", "GPU", "confidence", "evidence"]}
    rows=${found.items.map((event) => [time(event.at), words(event.kind),
      event.engine ? only(address, "events", "engine", event.engine) : "", event.gpu ? named(event.gpu) : "",
      event.confidence, {text: evidence(event.evidence), kind: "text"}])}
    empty="Nothing broke in this time." />
  ${found.next && html`<p><a href=${address("events", {...parameters, cursor: found.next})}>older</a></p>`}`;

export const events = {title: "Events", window: "1h", load, Show,
  ignores: ["model", "tenant", "objective"], why: "events are of engines and GPUs"};
