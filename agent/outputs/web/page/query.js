// Queries of the API, and its live figures. A token may be needed for either.
const KEY = "goodput-token";

// What requests are chosen by, in every view.
export const FILTERS = ["engine", "model", "tenant", "objective", "agent"];
// Routes that know fewer of them; the API refuses unknown parameters.
const OF_ENGINES = ["engine", "agent"];
const FEWER = {
  agents: [], names: [], gpus: ["agent"], gpu_use: ["agent"], engines: ["engine", "model", "agent"],
  setup: OF_ENGINES, events: OF_ENGINES, starts: OF_ENGINES, beside: OF_ENGINES,
};
let chosen = {};
export const ask_about = (filters) => { chosen = filters; };

export class AccessRefused extends Error {
  constructor(token) {
    super();
    this.token = token;
  }
}

// One login is for all tabs, until the agent refuses the token or somebody signs out.
const stored = () => localStorage.getItem(KEY);
export const is_signed_in = () => stored() !== null;

// Stores a token if the agent takes it.
export async function sign_in(token) {
  await ask("/api/v1/agents", {token});
  localStorage.setItem(KEY, token);
}

// Another tab may have a new token already.
export const forget = (token = stored()) => { if (token === stored()) localStorage.removeItem(KEY); };

// Calls `then` if another tab signs in or out.
export const on_login = (then) => addEventListener("storage", ({key}) => { if (key === KEY || key === null) then(); });

// The headers of a query.
export const authorization = (token = stored()) => (token ? {Authorization: `Bearer ${token}`} : {});

// Milliseconds in which at least one query waited for its response: about what the page costs the agent.
let waiting = 0;
let since = 0;
let spent_ms = 0;
export const busy_ms = () => spent_ms + (waiting ? performance.now() - since : 0);

async function timed(work) {
  if (waiting === 0) since = performance.now();
  waiting += 1;
  try {
    return await work();
  } finally {
    waiting -= 1;
    if (waiting === 0) spent_ms += performance.now() - since;
  }
}

async function ask(path, {signal, token = stored()} = {}) {
  const response = await fetch(path, {headers: authorization(token), signal});
  if (response.status === 401) throw new AccessRefused(token);
  if (!response.ok) {
    const detail = await response.json().then((body) => body.detail, () => "");
    const error = new Error(detail || `${path} answered ${response.status}`);
    error.status = response.status;
    throw error;
  }
  return response;
}

const chosen_for = (path) => {
  const known = path.includes("/") ? [] : FEWER[path] ?? FILTERS;
  return Object.fromEntries(Object.entries(chosen).filter(([name]) => known.includes(name)));
};

// Parameters that are empty are left out.
export async function query(path, parameters = {}) {
  const given = Object.entries({...chosen_for(path), ...parameters}).filter(([, value]) => value !== "" && value != null);
  const search = new URLSearchParams(given).toString();
  return timed(async () => (await ask(`/api/v1/${path}${search && `?${search}`}`)).json());
}

// EventSource sends no headers, so no token: the events are read from a response instead.
export async function follow(onEvent, signal) {
  const response = await ask("/api/v1/live", {signal});
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const events = (left + value).split("\n\n");
    left = events.pop();
    events.map(parsed).filter(Boolean).forEach(onEvent);
  }
}

function parsed(text) {
  const fields = Object.fromEntries(text.split("\n").filter((line) => line && line[0] !== ":")
    .map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 1).trim()]));
  return fields.data ? {name: fields.event, data: JSON.parse(fields.data)} : null;
}
