// What the agent sees of its engines, and the lines that let it see more, until the reader dismisses them.
import {Component, html} from "./elements.js";

const KEY = "goodput-setup";
const MOST_GROUPS = 3;

// Steps that were missing when the reader dismissed the card, as "engine/step".
function dismissed() {
  try {
    return new Set(JSON.parse(localStorage.getItem(KEY) ?? "[]"));
  } catch {
    return new Set();
  }
}

const missing = ({steps}) => steps.filter(({state}) => state === "missing");
const keys = (setups) => setups.flatMap((of) => missing(of).map(({name}) => `${of.agent}/${of.engine}/${name}`));

const names = (setups) => setups.map(({engine}) => engine).join(", ");
const few = ({engine}, others) => (others.length ? `${engine} and ${others.length} more` : engine);

// Engines that lack the same steps are shown together.
function groups(setups) {
  const found = new Map();
  for (const of of setups.filter((each) => missing(each).length)) {
    const lacks = missing(of).map(({name}) => name).join();
    found.set(lacks, [...found.get(lacks) ?? [], of]);
  }
  return [...found.values()];
}

const Action = ({where, lines}) => html`
  <p>${where}${lines.length > 0 && ":"}</p>
  ${lines.length > 0 && html`<pre tabindex="0" role="region" aria-label=${where}>${lines.join("\n")}</pre>`}`;

const Step = ({name, shows, actions}) => html`
  <p><strong>${name}</strong>: ${shows}</p>
  ${actions.map((action) => html`<${Action} ...${action} />`)}`;

function Engines({of: [first, ...others], named = false}) {
  const [next, ...later] = missing(first);
  const seen = first.steps.filter(({state}) => state === "done").map(({name}) => name);
  return html`
    <p>Seen of ${named ? names([first, ...others]) : few(first, others)}: ${seen.join(", ") || "nothing yet"}. To see more:</p>
    <${Step} ...${next} />
    ${later.length > 0 && html`<details><summary>Then: ${later.map(({name}) => name).join(", ")}</summary>
      ${later.map((step) => html`<${Step} ...${step} />`)}</details>`}`;
}

export class Setup extends Component {
  dismiss = () => {
    try {
      localStorage.setItem(KEY, JSON.stringify(keys(this.props.of)));
    } catch {
      // Without storage it comes back with the next page.
    }
    this.setState({dismissed: keys(this.props.of).join()});
  };

  render({of}, {dismissed: here}) {
    const known = dismissed();
    const all = groups(of);
    const rest = all.slice(MOST_GROUPS);
    if (keys(of).every((key) => known.has(key)) || here === keys(of).join()) return null;
    return html`
      <section class="setup" aria-labelledby="setup">
        <h2 id="setup">Next steps</h2>
        ${all.slice(0, MOST_GROUPS).map((group) => html`<${Engines} of=${group} />`)}
        ${rest.length > 0 && html`<details><summary>${rest.flat().length} more engines</summary>
          ${rest.map((group) => html`<${Engines} of=${group} named />`)}</details>`}
        <button type="button" onClick=${this.dismiss}>Dismiss</button>
      </section>`;
  }
}
