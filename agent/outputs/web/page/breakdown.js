// The view of groups: the same figures for each engine, model, tenant, user and so on.
import {Note, Table, html, named, only} from "./elements.js";
import {period} from "./period.js";
import {FILTERS, query} from "./query.js";
import {dollars, milliseconds, number, percent, words} from "./words.js";

const KINDS = ["engine", "model", "tenant", "user", "workload", "session", "input_length", "priority", "agent"];
const MOST = 100;
// The cost of groups is summed from every row of the window.
const MOST_S = 6 * 3600;

async function load(parameters) {
  const {asked, name, length_s: length} = await period(parameters);
  const {by = "engine", sort = "-requests"} = parameters;
  const cost = length <= MOST_S;
  const found = await query("breakdown", {by, sort: cost || !sort.endsWith("cost") ? sort : "-requests", cost, limit: MOST, ...asked});
  return {...found, sort, cost, over: name(found)};
}

// Name, key of the sort, and whether the first click shows the lowest first.
const COLUMNS = [
  ["requests", "requests"], ["missed", "missed"], ["met", "attainment", true], ["TTFT p95", "ttft"], ["TPOT p95", "tpot"],
  ["e2e p95", "e2e"], ["tokens in", "input_tokens"], ["tokens out", "output_tokens"], ["cost", "cost"],
];

const opposite = (sort) => (sort.startsWith("-") ? sort.slice(1) : `-${sort}`);

// A heading that sorts, and the other way round if it is clicked again.
function heading(address, by, sorted, [name, key, is_lowest = false]) {
  const usual = is_lowest ? key : `-${key}`;
  const is_sorted = sorted.replace("-", "") === key;
  const direction = is_sorted ? (sorted.startsWith("-") ? "descending" : "ascending") : null;
  return {name, sorted: direction, href: address("breakdown", {by, sort: is_sorted ? opposite(sorted) : usual})};
}

const K = 1024;
const tokens = (text) => Number.parseInt(text, 10) * (text.includes("k") ? K : 1);

// Groups of lengths are as "1k-4k" or "64k+".
function lengths(group) {
  const [least, most] = group.replace("+", "").split("-");
  return {min_input_tokens: tokens(least), max_input_tokens: most ? tokens(most) - 1 : ""};
}

// What a name leads to: everything of it, or its requests if figures cannot be chosen by it.
function title(address, by, group) {
  if (group === null) return "unknown";
  if (FILTERS.includes(by)) return only(address, "now", by, group);
  const chosen = by === "input_length" ? lengths(group) : {[by]: group};
  return named(html`<a href=${address("requests", chosen)}>${group}</a>`);
}

// Of the requests that were judged; a bar, because a column of shares hides the one that is low.
function Met({met, missed}) {
  const judged = met + missed;
  if (!judged) return "–";
  return html`<span class="meter" aria-hidden="true"><span style=${{width: `${100 * met / judged}%`}}></span></span>${percent(met / judged, 1)}`;
}

const row = (address, by) => (group) => [
  title(address, by, group.group),
  number(group.requests), group.missed ? html`<a href=${missed(address, by, group.group)}>${number(group.missed)}</a>` : "0",
  html`<${Met} ...${group} />`,
  milliseconds(group.ttft_ms.p95), milliseconds(group.tpot_ms.p95), milliseconds(group.e2e_ms.p95),
  number(group.input_tokens, 0), number(group.output_tokens, 0), dollars(group.cost?.cost_usd),
  {text: group.cause_details.length ? words(group.cause_details[0].cause) : "", kind: "name"},
];

function missed(address, by, group) {
  const chosen = group === null ? {} : by === "input_length" ? lengths(group) : {[by]: group};
  return address("requests", {...chosen, verdict: "missed", worst: "e2e"});
}

const Kinds = ({address, by, sort}) => html`
  <nav aria-label="Breakdown by" class="kinds"><span class="quiet">By</span> <ul>${KINDS.map((kind) => html`
    <li><a href=${address("breakdown", {by: kind, sort})} aria-current=${kind === by ? "true" : null}>${words(kind)}</a></li>`)}
  </ul></nav>`;

// On a phone the headings are not shown.
const Sorts = ({address, by, sort}) => html`
  <form class="sorts" onSubmit=${(event) => event.preventDefault()}><label>Sort by
    <select value=${sort} onChange=${(event) => { location.hash = address("breakdown", {by, sort: event.target.value}); }}>
      ${COLUMNS.map(([name, key, is_lowest = false]) => html`<option value=${is_lowest ? key : `-${key}`}>${name}</option>`)}
    </select></label></form>`;

function Show({data: {by, sort, cost, groups, left_out: rest, times_one_in: one_in, over}, parameters, address}) {
  const heads = COLUMNS.filter(([name]) => cost || name !== "cost").map((each) => heading(address, by, sort, each));
  const without_cost = (cells) => (cost ? cells : cells.toSpliced(-2, 1));
  return html`
    <h2>Requests by ${words(by)}, ${over}</h2>
    <${Kinds} address=${address} by=${by} sort=${parameters.sort} />
    <${Sorts} address=${address} by=${by} sort=${sort} />
    <${Table} label="A heading sorts; a name shows its figures alone" pairs
      head=${[heading(address, by, sort, [words(by), "group", true]), ...heads, "main cause"]}
      words=${["main cause"]} rows=${groups.map(row(address, by)).map(without_cost)} empty="No request ended in this window." />
    ${one_in > 1 && html`<${Note}>Percentiles are of one in ${number(one_in)} requests; counts are of all.<//>`}
    ${rest > 0 && html`<${Note}>${number(rest)} more groups are left out.<//>`}
    <${Note}>Met is the share of judged requests that met every objective on them. ${cost ? "Cost is each request's part of busy time; idle time belongs to nobody."
      : "Cost is shown for windows up to 6 hours: it is summed from every request."}<//>`;
}

export const breakdown = {title: "Breakdown", window: "1h", load, Show};
