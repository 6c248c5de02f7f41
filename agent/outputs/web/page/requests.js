// The view of requests: found by an id, filtered and sorted, and written as CSV.
import {Awaited, Component, Input, Note, Reasons, html} from "./elements.js";
import {period} from "./period.js";
import {FILTERS, query} from "./query.js";
import {Scatter, box_of, by_of, in_box, read_contrast, read_dots} from "./scatter.js";
import {as_csv, save} from "./saving.js";
import {UNKNOWN, dollars, number, seconds, time, words} from "./words.js";

const PAGE = 50;
// The API's longest page, and how many of them make a file.
const FILE_PAGE = 1000;
const FILE_PAGES = 10;
const ORDERS = {
  ttft: "worst TTFT", tpot: "worst TPOT", e2e: "worst end to end", queue: "longest queue",
  input_tokens: "most input tokens", output_tokens: "most output tokens", cost: "highest cost",
};

// A request with an id is found whatever is chosen.
const NO_FILTERS = Object.fromEntries(FILTERS.map((name) => [name, ""]));

// Not of a query: what the API knows under other names, or not at all.
const wanted_of = ({window, from, until, worst, cursor, y, box, ...wanted}) => ({...wanted, sort: worst ?? wanted.sort});

async function load(parameters) {
  const wanted = wanted_of(parameters);
  if (wanted.id) {
    const by_id = {...NO_FILTERS, id: wanted.id};
    const page = await query("requests", {...by_id, cursor: parameters.cursor, limit: PAGE});
    return {page, asked: {}, wanted: by_id, over: null, causes: []};
  }
  const {asked, name, is_range} = await period(parameters);
  // The window is of the agent's clock, which a viewer's may be far from.
  const summary = await query("summary", asked);
  const bounds = {started_from: summary.window_from, started_until: is_range ? summary.window_until : null};
  const {sort, order, ...filter} = wanted;
  const [by, box] = [by_of(parameters), box_of(parameters)];
  const all = {...wanted, ...bounds, ...(box ? in_box(box, by) : {})};
  const seen = {...filter, ...asked, by};
  const contrast = box && read_contrast(box, seen);
  const page = await query("requests", {...all, cursor: parameters.cursor, limit: PAGE});
  const over = `${is_range ? "" : "in the "}${name(summary)}`;
  const dots = read_dots(seen).then((found) => ({dots: found, over}));
  return {page, dots, contrast, asked, wanted: all, over, causes: summary.cause_details.map(({cause}) => cause)};
}

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
  cost: "the engine has no price, or its minutes are not stored yet",
};

const missed = (request) => request.verdict === "missed";
// A met request has no cause.
const why = (request) => (request.cause ? words(request.cause) : request.explained_at ? "cause unknown" : "not explained yet");

// "missed: kv pressure"; a phone shows the cause alone, in the colour of the verdict.
const verdict = (request) => (missed(request) && request.cause
  ? html`<span class="wide">missed: </span>${why(request)}`
  : missed(request) ? html`missed<span class="wide">: ${why(request)}</span>` : request.verdict);

const on_day = {month: "numeric", day: "numeric", hour: "numeric", minute: "2-digit"};

// Clients repeat ids, so the span of the request goes along.
function started(address, {request_id: id, trace_id: trace, span_id: span, started_at: at}) {
  const of_today = new Date(at).toDateString() === new Date().toDateString();
  const text = of_today ? time(at) : html`<span class="wide">${time(at)}</span><span class="phone">${
    new Date(at).toLocaleString([], on_day)}</span>`;
  return html`<a href=${address("request", {id: id ?? trace, span})}>${text}</a>`;
}

// The columns: their field, what it sorts by, and how it is shown. Of `few` there is room on a phone,
// of `most` from 600 pixels on, of the others from 1100 pixels on.
const COLUMNS = [
  {name: "verdict", field: "verdict", room: "few", is_text: true, show: verdict, kind: ({verdict: of}) => of},
  {name: "TTFT", field: "ttft_s", sort: "ttft", room: "few", show: ({ttft_s: s}) => seconds(s)},
  {name: "TPOT", field: "tpot_s", sort: "tpot", room: "most", show: ({tpot_s: s}) => seconds(s)},
  {name: "e2e", field: "e2e_s", sort: "e2e", room: "few", show: ({e2e_s: s}) => seconds(s)},
  {name: "queue", field: "queue_s", sort: "queue", room: "most", show: ({queue_s: s}) => seconds(s)},
  {name: "tokens in", field: "input_tokens", sort: "input_tokens", room: "most", show: ({input_tokens: n}) => number(n)},
  {name: "tokens out", field: "output_tokens", sort: "output_tokens", room: "all", show: ({output_tokens: n}) => number(n)},
  {name: "engine", field: "engine", room: "most", is_text: true, kind: () => "name"},
  {name: "model", field: "model", room: "all", is_text: true, kind: () => "name"},
  {name: "tenant", field: "tenant", room: "all", is_text: true, kind: () => "name"},
  {name: "status", field: "status", room: "all", is_text: true},
  {name: "cost", field: "cost_usd", sort: "cost", room: "all", show: ({cost_usd: usd}) => dollars(usd)},
];
const FEW = COLUMNS.filter(({room}) => room === "few").map(({sort}) => sort);

// What the list is sorted by is always shown, on a phone instead of the end to end time.
const room_of = ({sort, room}, key) => (sort && sort === key ? "few"
  : sort === "e2e" && key !== "started" && !FEW.includes(key) ? "most" : room);

const unknown_in = (rows) => COLUMNS.filter(({name, field}) =>
  WHY_NOT[name] && rows.some((request) => (request[field] ?? "") === "")).map(({name}) => [name, WHY_NOT[name]]);

const order_of = ({worst, sort, order}) => ({key: worst ?? sort ?? "started", direction: order === "asc" ? "ascending" : "descending"});

// The first click sorts the highest first, the second the lowest, the third the newest.
function Head({column, parameters, choose}) {
  const {name, sort, is_text} = column;
  const {key, direction} = order_of(parameters);
  const side = `${room_of(column, key)} ${is_text ? "left" : ""}`;
  if (!sort) return html`<th scope="col" role="columnheader" class=${side}>${name}</th>`;
  const by = key !== sort ? {sort, order: ""} : direction === "descending" ? {sort, order: "asc"} : {sort: "", order: ""};
  return html`<th scope="col" role="columnheader" class=${side} aria-sort=${key === sort ? direction : "none"}>
    <button type="button" class="sort" onClick=${() => choose({worst: "", ...by, cursor: ""})}>${name}</button></th>`;
}

const Cell = ({column, column: {field, is_text, kind, show}, request, order}) => html`
  <td role="cell" class=${`${room_of(column, order)} ${is_text ? "left" : ""} ${kind?.(request) ?? ""}`}>${
    show?.(request) ?? (request[field] || UNKNOWN)}</td>`;

const EMPTY = "No request that the agent saw in this window matches the filter. It sees requests by vLLM's plugin, by the engine's spans and through its proxy.";

function Requests({label, rows, empty, parameters, choose, address}) {
  if (!rows.length) return html`<p class="quiet">${label}</p><p>${empty}</p>`;
  const {key, direction} = order_of(parameters);
  return html`
    <div class="scrolling" role="region" aria-label=${label} tabindex="0">
      <table role="table" class="requests">
        <caption><span>${label}</span></caption>
        <thead role="rowgroup"><tr role="row">
          <th scope="col" role="columnheader" class="few left" aria-sort=${key === "started" ? direction : "none"}>
            <button type="button" class="sort" onClick=${() => choose({worst: "", sort: "", order: "", cursor: ""})}>started</button></th>
          ${COLUMNS.map((column) => html`<${Head} column=${column} parameters=${parameters} choose=${choose} />`)}</tr></thead>
        <tbody role="rowgroup">${rows.map((request) => html`
          <tr role="row"><th scope="row" role="rowheader" class="few left" title=${request.started_at}>${started(address, request)}</th>
            ${COLUMNS.map((column) => html`<${Cell} column=${column} request=${request} order=${key} />`)}
          </tr>`)}</tbody>
      </table>
    </div>`;
}

const Choice = ({name, label, options, chosen, choose}) => html`
  <label>${label}<select name=${name} value=${chosen ?? ""}
    onChange=${(event) => choose({[name]: event.target.value, cursor: ""})}>
    ${options.map(([value, text]) => html`<option value=${value}>${text}</option>`)}
  </select></label>`;

const Entry = ({name, label, chosen, choose, type = "text", suggestions = [], onFocus = null}) => html`
  <label>${label}<${Input} name=${name} type=${type} value=${chosen ?? ""} min="0" size="10" autocomplete="off"
    list=${suggestions.length ? `known-${name}` : null} onFocus=${onFocus}
    onChange=${(event) => choose({[name]: event.target.value.trim(), cursor: ""})} />
    ${suggestions.length > 0 && html`<datalist id=${`known-${name}`}>
      ${suggestions.map((each) => html`<option value=${each}></option>`)}</datalist>`}</label>`;

// Suggests the busiest names of the window. They are read when the entry is used: users and sessions
// are read row by row.
class Suggested extends Component {
  state = {names: []};

  read = async () => {
    const {name, asked} = this.props;
    const of = JSON.stringify(asked);
    if (this.of === of) return;
    this.of = of;
    const {groups} = await query("breakdown", {by: name, ...asked, limit: 100}).catch(() => ({groups: []}));
    this.setState({names: groups.map(({group}) => group).filter(Boolean)});
  };

  render({asked, ...entry}, {names}) {
    return html`<${Entry} ...${entry} suggestions=${names} onFocus=${this.read} />`;
  }
}

const MORE = ["status", "user", "session", "workload", "min_input_tokens", "max_input_tokens"];

function Filter({parameters, asked, causes, choose}) {
  const any = ["", "any"];
  const each = (names) => [any, ...names.map((name) => [name, words(name)])];
  const of = (name, label) => ({name, label, chosen: parameters[name], choose});
  const {key} = order_of(parameters);
  return html`
    <form aria-label="Filter" class="filter" onSubmit=${(event) => event.preventDefault()}>
      <${Entry} ...${of("id", "Find an id")} type="search" />
      <${Choice} ...${of("verdict", "Verdict")} options=${each(["met", "missed", "undetermined"])} />
      <${Choice} ...${of("cause", "Cause")} options=${each(causes)} />
      <${Choice} name="sort" label="Order" options=${[["", "newest first"], ...Object.entries(ORDERS)]}
        chosen=${key === "started" ? "" : key} choose=${({sort}) => choose({worst: "", order: "", sort, cursor: ""})} />
      <details class="more-filters" open=${MORE.some((name) => parameters[name])}>
        <summary>More filters</summary>
        <div>
          <${Choice} ...${of("status", "Status")} options=${each(["ok", "error", "timeout", "cancelled", "throttled", "invalid"])} />
          ${["user", "session", "workload"].map((name) => html`
            <${Suggested} ...${of(name, name[0].toUpperCase() + name.slice(1))} asked=${asked} />`)}
          <${Entry} ...${of("min_input_tokens", "Input tokens from")} type="number" />
          <${Entry} ...${of("max_input_tokens", "to")} type="number" />
        </div>
      </details>
    </form>`;
}

const FILE_COLUMNS = ["started_at", "request_id", "response_id", "trace_id", "span_id", "verdict", "cause", "status",
  "ttft_s", "tpot_s", "e2e_s", "queue_s", "prefill_s", "decode_s", "input_tokens", "cached_tokens", "output_tokens",
  "preemptions", "engine", "model", "tenant", "end_user", "session", "workload", "cost_usd"];

async function save_all(wanted) {
  const rows = [];
  let cursor = null;
  for (let pages = 0; pages < FILE_PAGES && (pages === 0 || cursor); pages += 1) {
    const page = await query("requests", {...wanted, cursor, limit: FILE_PAGE});
    rows.push(...page.items);
    cursor = page.next;
  }
  save("requests.csv", as_csv(FILE_COLUMNS, rows));
}

function Show({data: {page, dots, contrast, asked, wanted, over, causes}, parameters, choose, address}) {
  const known = parameters.cause && !causes.includes(parameters.cause) ? [...causes, parameters.cause] : causes;
  const {key} = order_of(parameters);
  const label = over === null ? `Requests with the id ${parameters.id}, of all time`
    : `Requests that began ${over}${box_of(parameters) ? ", in the box" : ""}`;
  const empty = over === null ? "No request with this id is stored. An id is found whole: of the request, of the response, of the engine or of the trace." : EMPTY;
  return html`
    <${Filter} parameters=${parameters} asked=${asked} causes=${known} choose=${choose} />
    ${dots && html`<${Awaited} of=${dots} waiting="Reading the dots." failed="No dots"
      show=${(found) => html`<${Scatter} ...${found} contrast=${contrast} parameters=${parameters} choose=${choose} address=${address} />`} />`}
    <${Requests} label=${label} rows=${page.items} empty=${empty} parameters=${parameters} choose=${choose} address=${address} />
    ${page.items.length > 0 && html`<p class="pages">
      ${parameters.cursor && html`<a href=${address("requests", {...parameters, cursor: ""})}>first ${PAGE}</a>`}
      ${page.next && html`<a href=${address("requests", {...parameters, cursor: page.next})}>next ${PAGE}</a>`}
      <button type="button" onClick=${() => save_all(wanted)}>Save as CSV</button>
      <span class="quiet">All that match, up to ${number(FILE_PAGE * FILE_PAGES)}.</span></p>`}
    ${key !== "started" && html`<${Note}>Requests without ${words(key)} are left out of this order.<//>`}
    <${Reasons} of=${unknown_in(page.items)} />`;
}

export const requests = {title: "Requests", window: "1h", load, Show};
