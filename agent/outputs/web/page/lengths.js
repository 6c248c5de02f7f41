// The view of lengths: attainment by input and output length.
import {Note, Table, html} from "./elements.js";
import {period} from "./period.js";
import {query} from "./query.js";
import {number, percent} from "./words.js";

async function load(parameters) {
  const {asked, name} = await period(parameters);
  const [found, objectives] = await Promise.all([query("lengths", asked), query("objectives", asked)]);
  const targets = objectives.items.map(({definition}) => definition.target).filter((target) => target != null);
  // A request that is met is met by all its objectives, so the strictest target is the one to compare with.
  return {...found, over: name(found), target: targets.length ? Math.max(...targets) : null};
}

// Which colour a cell has; none without a target.
function level(attainment, target) {
  if (target === null) return "";
  return attainment >= target ? "high" : attainment >= twice_missed(target) ? "middle" : "low";
}

const twice_missed = (target) => Math.max(0, 2 * target - 1);

function cell(found, target) {
  if (!found || found.attainment === null) return "–";
  const {attainment, met, missed} = found;
  return html`<span class="level ${level(attainment, target)}">${percent(attainment, 1)}<br />
    <span class="quiet">of ${number(met + missed)}</span></span>`;
}

const colours = (target) => (target === null ? "" : `Green from the strictest target, ${percent(target)}, red `
  + `below ${percent(twice_missed(target))}, which is twice the misses it allows, amber between.`);

function Show({data}) {
  const at = (input, output) => data.items.find((each) =>
    each.input_length === input && each.output_length === output);
  return html`
    <h2>Attainment by length, ${data.over}</h2>
    <div class="heat"><${Table} label="Rows are input tokens, columns are output tokens"
      head=${["input \\ output", ...data.output_lengths]}
      rows=${data.input_lengths.map((input) => [input, ...data.output_lengths.map((output) => cell(at(input, output), data.target))])} /></div>
    ${data.one_in > 1 && html`<${Note}>A sample: about one in ${number(data.one_in)} requests. Choose a shorter time to count all of them.<//>`}
    <${Note}>${colours(data.target)} Below the share is the number of judged requests; a dash: no request of these
      lengths was judged. 1k is 1024 tokens.<//>`;
}

export const lengths = {title: "Heatmap", window: "1h", load, Show};
