// The view of conversations: how turns fare by their number, and the worst sessions.
import {Note, Reasons, Table, html, named} from "./elements.js";
import {period} from "./period.js";
import {query} from "./query.js";
import {UNKNOWN, dollars, number, percent, plural, seconds, share} from "./words.js";

const MOST = 50;

async function load(parameters) {
  const {asked, name} = await period(parameters);
  const found = await query("conversations", {...asked, sort: "worst", limit: MOST});
  return {...found, over: name({...found, window_s: (Date.parse(found.window_until) - Date.parse(found.window_from)) / 1000})};
}

// A session may have begun before the window. Then its requests are those since.
const requests_of = (address, {session, began_at: begin}, from) => address("requests",
  {session, ...(Date.parse(begin) < Date.parse(from) ? {from: begin, window: ""} : {})});

const missed = (count) => (count > 0 ? {text: number(count), kind: "missed"} : number(count));

// "met", or of several objectives "agents: met, chats: missed".
function verdict(verdicts) {
  const all = Object.entries(verdicts);
  const kind = ["missed", "undetermined", "met"].find((each) => Object.values(verdicts).includes(each));
  return all.length ? {text: all.length === 1 ? all[0][1] : all.map((pair) => pair.join(": ")).join(", "), kind} : UNKNOWN;
}

const HEAD = ["session", "turns", "missed turns", "TTFT of the first", "TTFT p50 of the others", "cached", "computed again", "cost of that",
  "tool gap p50", "verdict"];

const row = (address, from, is_judged) => (of) => [
  named(html`<a href=${requests_of(address, of, from)}>${of.session}</a>`), number(of.turns), missed(of.missed_turns),
  seconds(of.first_ttft_s), seconds(of.later_ttft_p50_s), share(of.cached_ratio), number(of.refilled_tokens, 0),
  dollars(of.refilled_usd), seconds(of.gap_p50_s), ...(is_judged ? [verdict(of.verdicts)] : []),
];

const by_turn = (of) => [
  of.bucket, number(of.turns), seconds(of.ttft_p50_s), seconds(of.ttft_p95_s), share(of.cached_ratio),
  seconds(of.gap_p50_s), seconds(of.gap_p95_s), number(of.evicted_tokens, 0), number(of.moved_tokens, 0), dollars(of.refilled_usd),
];

const judged = ({objective, met, missed: count, attainment}) => (attainment === null ? `no session could be judged by ${objective} yet`
  : `${percent(attainment, 1)} of ${plural(met + count, "session")} met ${objective}`);

const WHY_NOT = {
  missed_turns: ["missed turns", "no objective judged them"],
  first_ttft_s: ["TTFT of the first", "no first token was seen"],
  later_ttft_p50_s: ["TTFT p50 of the others", "there is one turn, or no first token was seen"],
  cached_ratio: ["cached", "the engine does not tell cached tokens"],
  refilled_tokens: ["computed again", "there is one turn, or the engine does not tell cached tokens"],
  refilled_usd: ["cost of that", "the engine has no price, or its minutes are not stored yet"],
  gap_p50_s: ["tool gap p50", "there is one turn, or turns overlap"],
};

const unknown_in = (items) => Object.entries(WHY_NOT).filter(([field]) => items.some((each) => each[field] === null)).map(([, why]) => why);

const Nothing = () => html`
  <p>No request of this time names its session. Name the header that has it: <code>proxy.session_header</code> of the agent's proxy,
    ${" "}<code>GOODPUT_AGENT_SESSION_HEADER</code> of vLLM's plugin. Without a header, <code>prompt_cache_key</code> or
    ${" "}<code>cache_salt</code> of the body is the session. <a href="/docs/conversations.md">More about conversations</a></p>`;

const Found = ({data: {by_turn: turns, by_objective: objectives, items, over, ...found}, address}) => html`
  <p>${plural(found.sessions, "session")} with ${plural(found.turns, "turn")}${objectives.map((each) => `; ${judged(each)}`)}.</p>
  <${Table} label=${`The worst sessions, ${over}: most missed turns, then most tokens computed again`} pairs words=${["verdict"]}
    head=${objectives.length ? HEAD : HEAD.slice(0, -1)} rows=${items.map(row(address, found.window_from, objectives.length > 0))} />
  ${found.left_out > 0 && html`<${Note}>${plural(found.left_out, "more session")} are left out.<//>`}
  <${Reasons} of=${unknown_in(items)} />
  <${Table} label=${`Turns by their number in the session, ${over}`} pairs
    head=${["turn", "turns", "TTFT p50", "TTFT p95", "cached", "gap p50", "gap p95", "evicted tokens", "moved tokens", "cost of both"]}
    rows=${turns.map(by_turn)} />
  ${!found.complete && html`<${Note}>Only the newest turns were read. Choose a shorter time to read all of them.<//>`}
  <${Note}>A gap is the time from the end of a turn to the begin of the next: a tool's or a user's. Tokens computed again were in the prompt
    before, and no longer in the cache: evicted on the same engine, or moved to another. <a href="/docs/conversations.md">More about conversations</a><//>`;

const Show = ({data, address}) => html`
  <h2>Conversations, ${data.over}</h2>
  ${data.sessions > 0 ? html`<${Found} data=${data} address=${address} />` : html`<${Nothing} />`}`;

export const conversations = {title: "Conversations", window: "1h", load, Show};
