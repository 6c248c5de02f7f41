// How long engines took to start, in which phases, and against the start before.
import {Table, html, only} from "./elements.js";
import {UNKNOWN, seconds, time, words} from "./words.js";

const MOST_PHASES = 3;

const longest = (phases) => Object.entries(phases).sort(([, one], [, other]) => other - one).slice(0, MOST_PHASES)
  .map(([name, length]) => `${words(name)} ${seconds(length)}`).join(", ");

const change = (by) => (by === null ? UNKNOWN : `${by < 0 ? "−" : "+"}${seconds(Math.abs(by))}`);

// The phase that changed most, if the start took noticeably longer or less.
const why = ({change_s: by, phase_changes: changes}) => {
  const [name, most] = Object.entries(changes).sort(([, one], [, other]) => Math.abs(other) - Math.abs(one))[0] ?? [];
  return name !== undefined && Math.abs(by) >= 1 ? `${change(by)}, of which ${words(name)} ${change(most)}` : change(by);
};

const row = (address) => (start) => [
  only(address, "now", "engine", start.engine), time(start.ready_at), seconds(start.start_s), why(start),
  seconds(start.first_request_s), longest(start.phases) || UNKNOWN,
];

export const Starts = ({of, address}) => of.length > 0 && html`
  <${Table} label="The last starts of engines, each against the one before"
    head=${["engine", "ready at", "took", "against the start before", "to the first request", "longest phases"]}
    words=${["against the start before", "longest phases"]} rows=${of.map(row(address))} pairs />`;
