// The page: which view is shown, its data, and the live figures beside it.
import {Input, html, render} from "./elements.js";
import {AccessRefused, FILTERS, ask_about, busy_ms, follow, forget, is_signed_in, on_login, query, sign_in} from "./query.js";
import {breakdown} from "./breakdown.js";
import {on_range} from "./chart.js";
import {conversations} from "./conversations.js";
import {cost} from "./cost.js";
import {efficiency} from "./efficiency.js";
import {events} from "./events.js";
import {lengths} from "./lengths.js";
import {has_ended, is_fresh} from "./fleet.js";
import {now} from "./now.js";
import {oneRequest} from "./one_request.js";
import {WINDOWS, field, iso, length_of, range_of} from "./period.js";
import {requests} from "./requests.js";
import {ZONE, span} from "./words.js";

const VIEWS = {now, requests, request: oneRequest, breakdown, conversations, efficiency, cost, events, lengths};
const SHOWN = ["now", "requests", "breakdown", "conversations", "efficiency", "cost", "events", "lengths"];
const RETRY_MS = 2000;
const REFRESH_MS = 10000;
const TICK_MS = 1000;
const NAMES_MS = 60000;
// A view is read again after so many times as long as its queries took: with its live figures, a page costs
// the agent less than one hundredth of a processor. But a thirtieth of its window may pass at most.
const PACE = 150;
const SLOWEST_MS = 180000;
const PARTS = 30;

const state = {
  name: "now", parameters: {}, data: null, awaited: false, problem: null, locked: false, refusal: "",
  live: null, liveProblem: null, heardAt: null, names: {}, namesAt: -Infinity,
};

// The part of the address behind # can be shared: #requests?verdict=missed. Returns the token in it, or null.
function read_address() {
  const [name, search] = location.hash.slice(1).split("?");
  const given = new URLSearchParams(name.includes("=") ? name : search);
  const token = given.get("token");
  given.delete("token");
  state.name = VIEWS[name] ? name : "now";
  state.parameters = Object.fromEntries(given);
  // No browser sends what is behind the #; a token is taken out of the address at once.
  if (token) history.replaceState(null, "", address(state.name, state.parameters));
  const {ignores = []} = VIEWS[state.name];
  ask_about(Object.fromEntries(chosen_filters().filter(([filter]) => !ignores.includes(filter))));
  return token;
}

const chosen_filters = () => FILTERS.map((name) => [name, state.parameters[name]]).filter(([, value]) => value);

// What stays chosen from one view to the next.
const KEPT = ["window", "from", "until", ...FILTERS];

// Parameters that are empty go.
const address = (name, parameters = {}) => {
  const kept = Object.fromEntries(KEPT.map((each) => [each, state.parameters[each]]));
  const given = Object.entries({...kept, ...parameters}).filter(([, value]) => value);
  const search = new URLSearchParams(given).toString();
  return `#${name}${search && `?${search}`}`;
};

// Change some parameters.
function choose(changes, name = state.name) {
  const chosen = {...(name === state.name ? state.parameters : {}), ...changes};
  location.hash = address(name, chosen);
}

// How many ranges were chosen since the page was opened: a double click goes back to the one before.
let ranges = 0;

function choose_range(range) {
  if (range) {
    ranges += 1;
    choose({...range, window: "", cursor: ""});
  } else if (range_of(state.parameters)) {
    if (ranges > 0) history.back();
    else choose({from: "", until: ""});
    ranges = Math.max(0, ranges - 1);
  }
}

let asked = 0;

let loaded = {at: 0, busy_ms: 0};

// Milliseconds from one reading of the view to the next.
function pace_ms() {
  const window = state.parameters.window ?? VIEWS[state.name].window;
  const slowest = window ? Math.min(SLOWEST_MS, 1000 * length_of(window) / PARTS) : SLOWEST_MS;
  return Math.max(REFRESH_MS, Math.min(PACE * (busy_ms() - loaded.busy_ms), slowest));
}

function refresh() {
  const is_past = Boolean(state.parameters.until);
  if (!document.hidden && !state.locked && !is_past && performance.now() - loaded.at >= pace_ms() - TICK_MS) load();
}

async function load() {
  const number = ++asked;
  loaded = {at: performance.now(), busy_ms: busy_ms()};
  try {
    read_names();
    const data = await VIEWS[state.name].load(state.parameters, live_of_all());
    // A slower answer to an earlier question is not shown.
    if (number === asked) Object.assign(state, {data, awaited: false, problem: null, locked: false});
  } catch (error) {
    if (number !== asked) return;
    if (error instanceof AccessRefused) lock(error);
    else state.problem = error.message;
  }
  show();
}

// Names change rarely, so they are not read with each view.
async function read_names() {
  if (performance.now() - state.namesAt < NAMES_MS) return;
  state.namesAt = performance.now();
  try {
    state.names = await query("names");
    show();
  } catch {
    // The view says what is wrong.
    state.namesAt = -Infinity;
  }
}

const NOT_TAKEN = "The agent refuses this token: it is no line of the file security.read_tokens.";
const NO_LONGER = "The agent no longer accepts the token that you signed in with.";

// Without a token nobody was refused.
function lock({token}) {
  if (token) {
    forget(token);
    state.refusal = NO_LONGER;
  }
  state.locked = true;
}

let following = false;

async function stay_live() {
  if (following) return;
  following = true;
  await follow_figures();
  following = false;
}

async function follow_figures() {
  for (;;) {
    try {
      await follow(take);
    } catch (error) {
      if (error instanceof AccessRefused) {
        lock(error);
        show();
        return;
      }
      state.liveProblem = "the agent cannot be reached";
      show();
    }
    await new Promise((resume) => setTimeout(resume, RETRY_MS));
  }
}

function take({name, data}) {
  const heardAt = Date.now();
  if (name === "figures") Object.assign(state, {live: {...data, heardAt}, liveProblem: null, heardAt});
  else state.liveProblem = data;
  show();
}

function start() {
  Object.assign(state, {locked: false, refusal: ""});
  load();
  stay_live();
}

async function enter(token) {
  try {
    await sign_in(token);
    start();
  } catch (error) {
    Object.assign(state, {locked: true, refusal: error instanceof AccessRefused ? NOT_TAKEN : error.message});
    show();
  }
}

const unlock = (event) => {
  event.preventDefault();
  enter(event.target.elements.token.value.trim());
};

const sign_out = () => {
  forget();
  location.reload();
};

// What another tab did: this one is let in, or has to ask again.
function follow_login() {
  if (!is_signed_in()) location.reload();
  else if (state.locked) start();
}

const Access = () => html`
  <form onSubmit=${unlock}>
    ${state.refusal && html`<p class="band" role="alert">${state.refusal}</p>`}
    <label>This agent shows its figures to holders of a token (security.read_tokens):
      <input name="token" type="password" autocomplete="off" required /></label>
    <button>Show the figures</button>
  </form>`;

const Navigation = () => html`
  <nav aria-label="Views"><ul>${SHOWN.map((name) => html`
    <li><a href=${address(name)}
      aria-current=${name === state.name ? "page" : null}>${VIEWS[name].title}</a></li>`)}
  </ul></nav>`;

// Seconds since an agent reported, if every agent that is shown has ended; else null. An agent whose file
// cannot be written reports nothing, and still reads engines.
function ended_s() {
  const {agent = ""} = state.parameters;
  const is_chosen = (name) => !agent || name === agent;
  const shown = (state.live?.agents ?? []).filter(({name}) => is_chosen(name));
  if (!shown.length || !shown.every(has_ended)) return null;
  const read = [...state.live.engines, ...state.live.gpus].filter((each) => is_chosen(each.agent));
  if (read.some((each) => is_fresh(state.live, each))) return null;
  return Math.min(...shown.map((each) => each.silent_s ?? Infinity)) + (Date.now() - state.heardAt) / 1000;
}

const is_old = () => state.liveProblem !== null || state.problem !== null || ended_s() !== null;

const ended = (age_s) => `Old: no agent has reported${Number.isFinite(age_s) ? ` for ${span(age_s)}` : ""}`;

const Live = () => html`<span class="state" role="status">${
  state.awaited ? "Reading the figures"
    : state.liveProblem ? `Not live: ${state.liveProblem}${state.heardAt ? `; these figures are ${span((Date.now() - state.heardAt) / 1000)} old` : ""}`
    : ended_s() !== null ? ended(ended_s())
    : state.parameters.until ? "Not live: a range of the past"
    : chosen_filters().length ? `Read every ${span(pace_ms() / 1000)}`
      : state.heardAt ? "Live" : "Connecting"}</span>`;

// A view without a window of its own is live, until a range is chosen.
function Windows({window}) {
  const {from, until} = state.parameters;
  const live = window ? Object.entries(WINDOWS).map(([each, name]) => [each, `last ${name}`]) : [["", "live"]];
  const take = (name) => (event) => {
    const value = iso(event.target.value);
    if (value) choose({from, until, [name]: value, window: "", cursor: ""});
  };
  return html`
    <label>Window
      <select value=${from ? "range" : state.parameters.window ?? window ?? ""}
        onChange=${(event) => choose({window: event.target.value, from: "", until: "", cursor: ""})}>
        ${live.map(([each, name]) => html`<option value=${each}>${name}</option>`)}
        ${from && html`<option value="range" disabled>a range</option>`}
      </select></label>
    <label>From<${Input} type="datetime-local" name="from" value=${field(from)} onChange=${take("from")} /></label>
    ${from && html`<label>Until<${Input} type="datetime-local" name="until" value=${field(until)} onChange=${take("until")} /></label>`}`;
}

// A choice of each kind of which there are several.
function Filters() {
  const {ignores = []} = VIEWS[state.name];
  return html`${FILTERS.map((kind) => {
    const chosen = state.parameters[kind] ?? "";
    const names = new Set(state.names[kind] ?? []);
    if (chosen) names.add(chosen);
    if (names.size < 2 && !chosen) return null;
    return html`
      <label>${capital(kind)}
        <select name=${kind} value=${chosen} class=${chosen ? "chosen" : ""} disabled=${ignores.includes(kind)}
          onChange=${(event) => choose({[kind]: event.target.value, cursor: ""})}>
          <option value="">all</option>
          ${[...names].sort().map((name) => html`<option value=${name}>${name}</option>`)}
        </select></label>`;
  })}
  ${chosen_filters().length > 0 && html`<a class="clear" href=${address(state.name, NO_FILTERS)}>Clear filters</a>`}`;
}

const NO_FILTERS = Object.fromEntries(FILTERS.map((kind) => [kind, ""]));
const capital = (text) => text[0].toUpperCase() + text.slice(1);

// Figures of these views are of all requests at once, so they say so.
function Ignored() {
  const {ignores = [], why} = VIEWS[state.name];
  const kinds = chosen_filters().map(([kind]) => kind).filter((kind) => ignores.includes(kind));
  return kinds.length > 0 && html`<p class="band">Not filtered by ${kinds.join(" and ")}: ${why}.</p>`;
}

// Live figures are of all requests; those of some are read again with the rest.
const live_of_all = () => (chosen_filters().length || range_of(state.parameters) ? null : state.live);

function Body() {
  const view = VIEWS[state.name];
  return html`
    <form onSubmit=${(event) => event.preventDefault()}>${state.name !== "request" && html`<${Windows} window=${view.window} /><${Filters} />`}</form>
    <${Ignored} />
    ${state.problem && html`<p class="band" role="alert">${state.data ? "These figures are old" : "No figures"}: ${state.problem}</p>`}
    ${state.data ? html`<${view.Show} data=${state.data} live=${live_of_all()} choose=${choose}
        parameters=${state.parameters} address=${address} />`
      : !state.problem && html`<p class="quiet">Reading the figures.</p>`}`;
}

const Page = () => html`
  <header><h1>goodput-agent</h1><${Navigation} /><${Live} /></header>
  <main aria-busy=${state.awaited} class=${is_old() ? "old" : ""}>
    ${state.locked ? html`<${Access} />` : html`<${Body} />`}
    <p class="quiet">Times are of ${ZONE}. A dash means unknown. The same figures:
      ${" "}<a href="/docs/api">the API</a>, <a href="/metrics">/metrics</a>. <a href="/docs">Documentation</a>, <a href="/runbooks/README.md">runbooks</a>.
      ${is_signed_in() && html` <button type="button" onClick=${sign_out}>Sign out</button>`}</p>
  </main>`;

function show() {
  document.title = `${VIEWS[state.name].title} – goodput-agent`;
  render(html`<${Page} />`, document.getElementById("page"));
}

function go() {
  const before = state.name;
  const token = read_address();
  // Figures of other parameters stay, in grey, until the new ones come.
  if (state.name === before) state.awaited = state.data !== null;
  else Object.assign(state, {data: null, problem: null, awaited: false});
  if (token) {
    enter(token);
  } else {
    show();
    load();
  }
  return token;
}

addEventListener("hashchange", go);
on_login(follow_login);
on_range(choose_range);
setInterval(refresh, TICK_MS);
document.getElementById("page").replaceChildren();
if (!go()) stay_live();
