// The view of lengths: attainment by input and output length.
import {Note, Table, html} from "./elements.js";
import {query} from "./query.js";
import {last, number, percent} from "./words.js";

const load = ({window = "1h"}) => query("lengths", {window});

const GOOD = 0.99;
const BAD = 0.9;
const level = (attainment) => (attainment >= GOOD ? "high" : attainment >= BAD ? "middle" : "low");

function cell(found) {
  if (!found || found.attainment === null) return "–";
  const {attainment, met, missed} = found;
  return html`<span class="level ${level(attainment)}">${percent(attainment, 1)}<br />
    <span class="quiet">of ${number(met + missed)}</span></span>`;
}

function Show({data}) {
  const at = (input, output) => data.items.find((each) =>
    each.input_length === input && each.output_length === output);
  return html`
    <h2>Attainment by length, ${last(data.window_s)}</h2>
    <div class="heat"><${Table} label="Rows are input tokens, columns are output tokens"
      head=${["input \\ output", ...data.output_lengths]}
      rows=${data.input_lengths.map((input) => [input, ...data.output_lengths.map((output) => cell(at(input, output)))])} /></div>
    <${Note}>Green from 99 % of the judged requests, red below 90 %, amber between. Below the share is their
      number; a dash: no request of these lengths was judged. 1k is 1024 tokens.<//>`;
}

export const lengths = {title: "Heatmap", window: "1h", load, Show};
