// Whether caches outside the GPUs, and drafts, pay: by what engines counted.
import {Note, Table, html, only} from "./elements.js";
import {UNKNOWN, number, seconds, share, words} from "./words.js";

const KINDS = {pays: "up", does_not_pay: "down", unknown: "undetermined"};
const verdict = (of) => ({text: words(of), kind: KINDS[of]});

// Agents may give their engines the same name.
const names = (savings, address) => {
  const several = new Set(savings.map(({agent}) => agent)).size > 1;
  return ({agent, engine}) => only(address, "efficiency", "engine", engine, several && ` (${agent})`);
};

const loaded = ({query_tokens: asked, hit_tokens: found, hit_ratio: ratio, saved_s: saved, load_s: loading, verdict: of}) => [
  number(asked, 0), number(found, 0), share(ratio), seconds(saved), seconds(loading), verdict(of),
];

const times = (value) => (value === null ? UNKNOWN : number(value, 2));

const by_position = (ratios) => Object.entries(ratios).sort(([one], [other]) => one - other)
  .map(([, ratio]) => share(ratio)).join(", ") || UNKNOWN;

const drafted = ({drafts, acceptance_ratio: accepted, mean_accepted_length: length, drafts_per_step: batch, ...of}) => [
  number(drafts, 0), share(accepted), {text: by_position(of.accepted_ratio_by_position), kind: "name"}, number(length, 2), number(batch, 1),
  times(of.speedup), `${times(of.at_least)}–${times(of.at_most)}`, verdict(of.verdict),
];

const LOADED = ["engine", "tokens looked up", "found", "hit ratio", "prefill saved (estimate)", "loading took", "verdict"];
const DRAFTED = ["engine", "drafts", "accepted", "by position", "tokens a step", "drafts a step", "speed-up (estimate)", "bounds", "verdict"];

export function Pays({savings = [], over, address}) {
  const name = names(savings, address);
  const of = (key, cells) => savings.filter((each) => each[key] !== null).map((each) => [name(each), ...cells(each[key])]);
  const [loads, drafts] = [of("offload", loaded), of("speculation", drafted)];
  return html`
    ${loads.length > 0 && html`
      <h2>Do caches outside the GPU pay?</h2>
      <${Table} label="KV values loaded instead of computed, ${over}" head=${LOADED} words=${["verdict"]} rows=${loads} pairs />
      <${Note}>They pay if the prefill that they save takes longer than loading. Saved is the loaded tokens at the mean prefill time of a
        computed token. <a href="/docs/caches.md#offload">How it is counted</a>.<//>`}
    ${drafts.length > 0 && html`
      <h2>Do drafts pay?</h2>
      <${Table} label="Speculative decoding, ${over}" head=${DRAFTED} words=${["by position", "verdict"]} rows=${drafts} pairs />
      <${Note}>The speed-up is tokens per second with drafts over those without, at the batches that ran: drafts pay above 1. It is unknown
        until batches of five minutes differ. <a href="/docs/caches.md#speculative-decoding">How it is estimated</a>.<//>`}`;
}
