// The view of requests: filtered, the newest or the worst first.
import {Note, Reasons, Table, html, link} from "./elements.js";
import {period} from "./period.js";
import {query} from "./query.js";
import {UNKNOWN, number, seconds, time, words} from "./words.js";

const PAGE = 50;
const WORST = {"": "newest first", ttft: "worst TTFT", tpot: "worst TPOT", e2e: "worst end to end"};

async function load(parameters) {
  const {asked, name, is_range} = await period(parameters);
  const {window, from, until, ...wanted} = parameters;
  // The window is of the agent's clock, which a viewer's may be far from.
  const summary = await query("summary", asked);
  const bounds = {started_from: summary.window_from, started_until: is_range ? summary.window_until : null};
  const page = await query("requests", {...wanted, ...bounds, limit: PAGE});
  return {page, over: `${is_range ? "" : "in the "}${name(summary)}`, causes: summary.cause_details.map(({cause}) => cause)};
}

// A met request has no cause, so its cell stays empty.
const cause = (request) => (request.cause ? words(request.cause)
  : request.verdict !== "missed" ? "" : request.explained_at ? UNKNOWN : "not explained yet");

const WHY_NOT = {
  engine: "no view of it names it",
  model: "neither the request nor a span names it",
  tenant: "the request named none",
  "tokens in": "neither the engine nor the response counts them",
  "tokens out": "neither the engine nor the response counts them",
  queue: "only the engine's view has it",
  TTFT: "no first token was seen",
  TPOT: "fewer than two tokens were seen",
  e2e: "the request's end was not seen",
};
const FIELDS = {"tokens in": "input_tokens", "tokens out": "output_tokens", queue: "queue_s", TTFT: "ttft_s",
  TPOT: "tpot_s", e2e: "e2e_s"};
const without = (rows) => Object.entries(WHY_NOT)
  .filter(([name]) => rows.some((request) => (request[FIELDS[name] ?? name] ?? "") === ""));

const row = (address) => (request) => [
  link(address, request),
  ...[request.engine, request.model, request.tenant].map((text) => ({text: text || UNKNOWN, kind: "name"})),
  number(request.input_tokens), number(request.output_tokens),
  seconds(request.queue_s), seconds(request.ttft_s), seconds(request.tpot_s), seconds(request.e2e_s),
  request.status, {text: request.verdict, kind: request.verdict},
  cause(request),
];

const Choice = ({name, label, options, chosen, choose}) => html`
  <label>${label}<select name=${name} value=${chosen ?? ""}
    onChange=${(event) => choose({[name]: event.target.value, cursor: ""})}>
    ${options.map(([value, text]) => html`<option value=${value}>${text}</option>`)}
  </select></label>`;

const Entry = ({name, label, chosen, choose, type = "text"}) => html`
  <label>${label}<input name=${name} type=${type} value=${chosen ?? ""} min="0" size="10"
    onChange=${(event) => choose({[name]: event.target.value.trim(), cursor: ""})} /></label>`;

function Filter({parameters, causes, choose}) {
  const any = ["", "any"];
  const each = (names) => [any, ...names.map((name) => [name, words(name)])];
  const shared = {choose};
  return html`
    <form aria-label="Filter" onSubmit=${(event) => event.preventDefault()}>
      <${Choice} ...${shared} name="worst" label="Order" options=${Object.entries(WORST)} chosen=${parameters.worst} />
      <${Choice} ...${shared} name="verdict" label="Verdict" options=${each(["met", "missed", "undetermined"])} chosen=${parameters.verdict} />
      <${Choice} ...${shared} name="cause" label="Cause" options=${each(causes)} chosen=${parameters.cause} />
      <${Entry} ...${shared} name="model" label="Model" chosen=${parameters.model} />
      <${Entry} ...${shared} name="tenant" label="Tenant" chosen=${parameters.tenant} />
      <${Entry} ...${shared} name="min_input_tokens" label="Input tokens from" type="number" chosen=${parameters.min_input_tokens} />
      <${Entry} ...${shared} name="max_input_tokens" label="to" type="number" chosen=${parameters.max_input_tokens} />
    </form>`;
}

function Show({data: {page, over, causes}, parameters, choose, address}) {
  const known = parameters.cause && !causes.includes(parameters.cause) ? [...causes, parameters.cause] : causes;
  return html`
    <${Filter} parameters=${parameters} causes=${known} choose=${choose} />
    <${Table} label=${`Requests that began ${over}`} rows=${page.items.map(row(address))} pairs
      head=${["started", "engine", "model", "tenant", "tokens in", "tokens out", "queue", "TTFT", "TPOT", "e2e",
        "status", "verdict", "cause"]} words=${["engine", "model", "tenant", "status", "verdict", "cause"]}
      empty="No request that the agent saw in this window matches the filter. It sees requests by vLLM's plugin, by the engine's spans and through its proxy." />
    <${Reasons} of=${without(page.items)} />
    <p>${parameters.cursor && html`<a href=${address("requests", {...parameters, cursor: ""})}>newest</a> `}
      ${page.next && html`<a href=${address("requests", {...parameters, cursor: page.next})}>older</a>`}</p>
    <${Note}>The address of this page keeps the filter, so it can be shared.<//>`;
}

export const requests = {title: "Requests", window: "1h", load, Show};
