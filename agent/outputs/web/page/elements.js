// What views are made of: preact's elements, written as HTML.
import htm from "./vendor/htm.js";
import {Component, h, render} from "./vendor/preact.js";
import {UNKNOWN, time} from "./words.js";

export const html = htm.bind(h);
export {Component, render};

// An entry whose text stays while somebody writes in it, though the page is drawn anew every two seconds.
export class Input extends Component {
  keep = (entry) => { this.entry = entry ?? this.entry; };

  componentDidUpdate({value}) {
    if (value !== this.props.value) this.entry.value = this.props.value;
  }

  render({value, ...given}) {
    return html`<input ...${given} ref=${this.keep} defaultValue=${value} />`;
  }
}

// Text whose flags, such as --max-num-seqs, stay whole: a browser breaks lines after their dashes.
export const flagged = (text) => text.split(/(--[a-z][\w-]*)/).map((part, index) => (
  index % 2 ? html`<span class="flag">${part}</span>` : part));

// Pairs of a name and a value; a third member says more, for instance why it is unknown.
export const Figures = ({label, of}) => html`
  <dl class="figures" aria-label=${label}>
    ${of.map(([name, value, more, kind]) => html`
      <div class=${kind ?? ""}><dt>${name}</dt><dd>${value}</dd>
        ${more && html`<dd class="more">${typeof more === "string" ? flagged(more) : more}</dd>`}</div>`)}
  </dl>`;

// Columns of numbers, or of words if `words` contains their names. Cells are texts, elements or
// {text, kind}; the first of a row is its heading. A name of `head` may be {name, href, sorted}, a link
// that sorts. On a phone a row with a cell of kind "text" is a block of lines, and a row of a table with
// `pairs` a block with two values on each line; a cell of kind "name" may be broken anywhere. The roles
// are given because a table that CSS takes apart loses them.
export const Table = ({label, head, rows, words = [], pairs = false, empty = "Nothing here yet."}) => {
  if (!rows.length) return html`<p class="quiet">${label}</p><p>${empty}</p>`;
  const names = head.map((given) => given.name ?? given);
  const side = names.map((name, index) => (index === 0 || words.includes(name) ? "left" : ""));
  const looks = pairs ? "stacked pairs" : rows[0].some((given) => given?.kind === "text") ? "stacked" : "";
  return html`
    <div class="scrolling" role="region" aria-label=${label} tabindex="0">
      <table role="table" class=${looks}>
        <caption><span>${label}</span></caption>
        <thead role="rowgroup"><tr role="row">${head.map((given, index) => html`
          <th scope="col" role="columnheader" class=${side[index]} aria-sort=${given.sorted}>${heading(given)}</th>`)}</tr></thead>
        <tbody role="rowgroup">${rows.map((cells) => html`
          <tr role="row">${cells.map(cell(names, side))}</tr>`)}</tbody>
      </table>
    </div>`;
};

const ARROWS = {ascending: "\u00a0\u2191", descending: "\u00a0\u2193"};
const heading = (given) => (given.href ? html`<a href=${given.href}>${given.name}${ARROWS[given.sorted]}</a>` : given);

const cell = (names, side) => (given, index) => {
  const {text, kind} = given?.kind ? given : {text: given, kind: ""};
  const looks = `${side[index]} ${kind}`.trim();
  return index === 0 ? html`<th scope="row" role="rowheader" class=${looks}>${text}</th>`
    : html`<td role="cell" data-name=${names[index]} class=${looks}>${text}</td>`;
};

// A name that shows what is of it alone, in this view; `more` follows it.
export const only = (address, view, kind, name, more = "") => (name == null || name === "" ? UNKNOWN
  : named(html`<a class="only" href=${address(view, {[kind]: name})}>${name}</a>${more}`));

// A name may be as long as somebody likes, so it may be broken anywhere.
export const named = (name) => html`<span class="called">${name}</span>`;

export const Note = ({children}) => html`<p class="quiet">${children}</p>`;

// What a promise brings. What is shown stays until the next is there; a slower answer to an earlier question
// is not shown.
export class Awaited extends Component {
  componentDidMount() { this.read(); }

  componentDidUpdate(before) {
    if (before.of !== this.props.of) this.read();
  }

  async read() {
    const {of} = this.props;
    const state = await of.then((found) => ({found}), (error) => ({problem: error.message}));
    if (of === this.props.of) this.setState({problem: null, ...state, read: of});
  }

  render({of, show, waiting, failed}, {found, problem, read}) {
    if (problem) return html`<p class="band" role="alert">${failed}: ${problem}</p>`;
    if (found === undefined) return html`<${Note}>${waiting}<//>`;
    return html`<div class="awaited" aria-busy=${read !== of}>${show(found)}</div>`;
  }
}

// From when to when minutes are stored: the newest are not, and a window may begin before the first.
export const CountedTime = ({of, children}) => html`
  <${Note}>Minutes from ${new Date(of.counted_from).toLocaleString()} to ${new Date(of.counted_until).toLocaleString()}.
    ${" "}${children}<//>`;

// When a request began, as a link to it. Clients repeat ids, so its span goes along.
export const link = (address, {request_id: id, trace_id: trace, span_id: span, started_at: at}) => html`
  <a href=${address("request", {id: id ?? trace, span})}>${time(at)}</a>`;

// Why values are a dash: pairs of a name and the reason, of those that are unknown.
export const Reasons = ({of}) => of.length ? html`
  <${Note}>Unknown: ${of.map(([name, why]) => `${name} (${why})`).join("; ")}.<//>` : null;

// Text with `code` between backticks.
export const coded = (text) => text.split("`").map((part, index) => (
  index % 2 ? html`<code>${part}</code>` : part));
