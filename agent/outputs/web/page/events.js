// The view of events: what broke, with its evidence.
import {Table, html} from "./elements.js";
import {query} from "./query.js";
import {number, time, words} from "./words.js";

const load = ({cursor}) => query("events", {limit: 50, cursor});

const moment = (seconds) => time(new Date(1000 * seconds).toISOString());

function value(name, each) {
  if (typeof each === "number") return name.endsWith("_at") ? moment(each) : number(each, 3);
  return typeof each === "object" ? JSON.stringify(each) : String(each);
}

const evidence = (facts) => Object.entries(facts).filter(([, each]) => each !== null)
  .map(([name, each]) => `${words(name)}: ${value(name, each)}`).join("; ");

const Show = ({data, address}) => html`
  <h2>Events</h2>
  <${Table} label="Events, the newest first" head=${["when", "what", "engine", "GPU", "confidence", "evidence"]}
    words=${["what", "engine", "GPU", "confidence", "evidence"]}
    rows=${data.items.map((event) => [time(event.at), words(event.kind), event.engine ?? "–", event.gpu ?? "–",
      event.confidence, {text: evidence(event.evidence), kind: "text"}])}
    empty="Nothing broke so far." />
  ${data.next && html`<p><a href=${address("events", {cursor: data.next})}>older</a></p>`}`;

export const events = {title: "Events", load, Show};
