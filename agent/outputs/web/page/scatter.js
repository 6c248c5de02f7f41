// One dot a request: when it began and how long it took. A box drawn around dots is compared with the rest.
import {moments} from "./chart.js";
import {Awaited, Component, Input, Note, Table, html, named} from "./elements.js";
import {query} from "./query.js";
import {number, plural, seconds, share, words} from "./words.js";

export const LATENCIES = {ttft: "TTFT", tpot: "TPOT", e2e: "end to end"};
// Drawn in this order, so that no missed request lies under one that met.
const VERDICTS = {undetermined: "--quiet", met: "--one", missed: "--bad"};
const HEIGHT = 260;
const DOT = 3;
// A shorter drag was a click, which opens the dot that is this near.
const CLICK_PIXELS = 5;
const NEAR_PIXELS = 8;
const LEAST_S = 1e-4;
// Many dots are read again each minute alone.
const MANY = 3000;
const FRESH_MS = {few: 9000, many: 60000};

export const by_of = ({y}) => (LATENCIES[y] ? y : "ttft");

// The address has a box as from_until_low_high, in Unix seconds and seconds.
export function box_of({box}) {
  const found = (box ?? "").split("_").map(Number);
  if (found.length !== 4 || found.some((each) => !Number.isFinite(each) || each < 0)) return null;
  const [from, until, low, high] = found;
  return {from, until, low, high};
}

const iso = (at) => new Date(1000 * at).toISOString();

// Parameters of the list that is in the box.
export const in_box = ({from, until, low, high}, by) => ({
  started_from: iso(from), started_until: iso(until), [`min_${by}_s`]: low, [`max_${by}_s`]: high,
});

let kept = {};

// A promise: the list does not wait for the dots of a day. `wanted` are the parameters of a query.
export function read_dots(wanted) {
  const of = JSON.stringify(wanted);
  if (kept.of !== of || Date.now() - kept.at > kept.fresh_ms) {
    const asked = {of, found: query("scatter", wanted), at: Infinity};
    asked.found.then(({dots}) => Object.assign(asked, {at: Date.now(), fresh_ms: FRESH_MS[dots > MANY ? "many" : "few"]}),
      () => { if (kept === asked) kept = {}; });
    kept = asked;
  }
  return kept.found;
}

let compared = {};

// A promise: all rows of the time are counted, which may take seconds, so the list does not wait.
export function read_contrast({from, until, low, high}, wanted) {
  const asked = {...wanted, box_from: iso(from), box_until: iso(until), box_min_s: low, box_max_s: high};
  const of = JSON.stringify(asked);
  if (compared.of !== of || Date.now() - compared.at > FRESH_MS.many) {
    compared = {of, found: query("contrast", asked), at: Date.now()};
    compared.found.catch(() => { compared = {}; });
  }
  return compared.found;
}

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const unix = (text) => Date.parse(text) / 1000;

// The values of the axis go by the decades that the dots need.
function heights(dots) {
  let [low, high] = [Infinity, 0];
  for (const {seconds: values} of Object.values(dots.by_verdict)) {
    for (const value of values) {
      if (value > 0 && value < low) low = value;
      if (value > high) high = value;
    }
  }
  if (!(high > 0)) return [0.01, 1];
  return [Math.max(LEAST_S, 0.8 * low), Math.max(2 * LEAST_S, 1.25 * high)];
}

const squares = (plot, index) => {
  const size = DOT * devicePixelRatio;
  const [at, values] = plot.data[index];
  const {ctx} = plot;
  ctx.save();
  ctx.fillStyle = style(Object.values(VERDICTS)[index - 1]);
  ctx.globalAlpha = values.length > MANY ? 0.5 : 0.8;
  for (let n = 0; n < at.length; n += 1) {
    const x = plot.valToPos(at[n], "x", true);
    const y = plot.valToPos(Math.max(values[n], LEAST_S), "y", true);
    ctx.fillRect(x - size / 2, y - size / 2, size, size);
  }
  ctx.restore();
  return null;
};

const data_of = (dots) => [null, ...Object.keys(VERDICTS).map((name) => {
  const {at, seconds: values} = dots.by_verdict[name];
  return [at, values];
})];

class Plot extends Component {
  keep = (holder) => { this.holder = holder ?? this.holder; };

  componentDidMount() {
    this.draw();
    this.resized = new ResizeObserver(([{contentRect}]) => {
      const width = Math.floor(contentRect.width);
      if (width && width !== this.plot.width) this.draw();
    });
    this.resized.observe(this.holder);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.redraw = () => this.draw();
    this.scheme.addEventListener("change", this.redraw);
  }

  componentDidUpdate(before) {
    if (before.dots !== this.props.dots) this.draw();
    else this.show_box();
  }

  componentWillUnmount() {
    this.scheme.removeEventListener("change", this.redraw);
    this.resized.disconnect();
    this.plot.destroy();
  }

  show_box() {
    const {box} = this.props;
    const {plot} = this;
    if (!box) {
      plot.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
      return;
    }
    const [left, right] = [box.from, box.until].map((at) => plot.valToPos(at, "x"));
    const [top, bottom] = [box.high, Math.max(box.low, LEAST_S)].map((value) => plot.valToPos(value, "y"));
    plot.setSelect({left, top, width: right - left, height: bottom - top}, false);
  }

  take = (plot) => {
    const {left, top, width, height} = plot.select;
    if (width < CLICK_PIXELS && height < CLICK_PIXELS) {
      this.show_box();
      return;
    }
    const [from, until] = [left, left + width].map((x) => plot.posToVal(x, "x"));
    const [high, low] = [top, top + height].map((y) => plot.posToVal(y, "y"));
    this.props.take({from, until, low, high});
  };

  // The dot that is nearest to the pointer, if one is near.
  nearest() {
    const {left, top} = this.plot.cursor;
    let best = {far: NEAR_PIXELS};
    for (const [at, values] of this.plot.data.slice(1)) {
      for (let n = 0; n < at.length; n += 1) {
        const x = this.plot.valToPos(at[n], "x") - left;
        if (Math.abs(x) > NEAR_PIXELS) continue;
        const far = Math.hypot(x, this.plot.valToPos(Math.max(values[n], LEAST_S), "y") - top);
        if (far < best.far) best = {far, at: at[n], value: values[n]};
      }
    }
    return best.at === undefined ? null : best;
  }

  click = () => {
    const {width, height} = this.plot.select;
    const drawn = width >= CLICK_PIXELS || height >= CLICK_PIXELS;
    const dot = drawn && !this.props.box ? null : this.nearest();
    if (dot) this.props.open(dot);
  };

  draw() {
    const {dots} = this.props;
    this.plot?.destroy();
    const line = {stroke: style("--line"), width: 1};
    const axis = {stroke: style("--text"), grid: line, ticks: line};
    const narrow = this.holder.clientWidth < 500;
    this.plot = new uPlot({
      mode: 2, width: Math.max(this.holder.clientWidth, 200), height: narrow ? 200 : HEIGHT, legend: {show: false}, padding: [8, 12, null, null],
      scales: {
        x: {time: true, range: [unix(dots.window_from), unix(dots.window_until)]},
        y: {distr: 3, log: 10, range: heights(dots)},
      },
      axes: [{...axis, space: 80, values: moments}, {...axis, size: 60, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : seconds(tick)))}],
      series: [{}, ...Object.values(VERDICTS).map(() => ({paths: squares, points: {show: false}, facets: [
        {scale: "x", auto: false}, {scale: "y", auto: false}]}))],
      cursor: {drag: {x: true, y: true, setScale: false}, points: {show: false}, bind: {dblclick: () => () => this.props.take(null)}},
      hooks: {ready: [() => this.show_box()], setSelect: [this.take]},
    }, data_of(dots), this.holder.querySelector(".plot"));
    this.plot.over.addEventListener("click", this.click);
  }

  render({label}) {
    return html`<div ref=${this.keep} class="scatter"><div class="plot" role="img" aria-label=${label}></div></div>`;
  }
}

const sampled = ({every, dots}) => (every === 1 ? plural(dots, "request")
  : `a sample of ${number(dots)}: about one in ${number(every)}`);

const Key = ({dots}) => Object.entries(dots.by_verdict).filter(([, {at}]) => at.length).map(([name, {at}]) => html`
  <span class="verdict-key"><span class="dot ${name}"></span>${number(at.length)} ${name}</span>`);

// The same box by numbers: for the keyboard, and for a phone.
function Numbers({box, dots, take}) {
  const local = (at) => new Date(1000 * at - 60000 * new Date(1000 * at).getTimezoneOffset()).toISOString().slice(0, 19);
  const [low, high] = heights(dots);
  const {from = unix(dots.window_from), until = unix(dots.window_until), low: least = low, high: most = high} = box ?? {};
  const given = (event) => {
    event.preventDefault();
    const {elements} = event.target;
    const [first, then] = ["box-from", "box-until"].map((name) => unix(elements[name].value));
    const values = ["box-low", "box-high"].map((name) => Number(elements[name].value));
    if (first < then && values[0] < values[1]) take({from: first, until: then, low: values[0], high: values[1]});
  };
  return html`
    <details class="numbers"><summary>Set the box by numbers</summary>
      <form onSubmit=${given}>
        <label>Began from<${Input} name="box-from" type="datetime-local" step="1" required value=${local(from)} /></label>
        <label>until<${Input} name="box-until" type="datetime-local" step="1" required value=${local(until)} /></label>
        <label>Seconds from<${Input} name="box-low" type="number" min="0" step="any" required value=${Number(least.toPrecision(3))} /></label>
        <label>to<${Input} name="box-high" type="number" min="0" step="any" required value=${Number(most.toPrecision(3))} /></label>
        <button>Compare</button>
      </form></details>`;
}

const of_all = (count, all) => `${number(count)} (${share(all ? count / all : null)})`;

const FILTERED = {tenant: "tenant", model: "model", engine: "engine", session: "session", cause: "cause"};

function Compared({contrast, address, parameters}) {
  const {inside, outside, items} = contrast;
  const name = (item) => (FILTERED[item.dimension]
    ? html`<a href=${address("requests", {...parameters, [item.dimension]: item.name, cursor: ""})}>${
      item.dimension === "cause" ? words(item.name) : item.name}</a>` : `${item.name} tokens`);
  const those = inside === 1 ? "What the request in the box has" : `What the ${number(inside)} requests in the box have`;
  const label = `${those} more of than ${outside === 1 ? "the other" : `the ${number(outside)} others`}`;
  const none = !inside ? "No request is in the box." : !outside ? "Every request is in the box, so there is none to compare with."
    : "Nothing by more than chance: cause, tenant, model, engine, input length and session are as in the others.";
  return html`<div class="compared"><${Table} label=${label} head=${["more of", "in the box", "outside"]} empty=${none}
    rows=${items.slice(0, 12).map((item) => [named(html`${words(item.dimension)}: ${name(item)}`),
      of_all(item.inside, inside), of_all(item.outside, outside)])} /></div>`;
}

// `data` are dots, and the contrast of a box; `over` names the time.
export function Scatter({dots, contrast, over, parameters, choose, address}) {
  const by = by_of(parameters);
  const box = box_of(parameters);
  const take = (drawn) => choose({box: drawn ? [drawn.from, drawn.until].map((at) => at.toFixed(1))
    .concat([drawn.low, drawn.high].map((value) => value.toPrecision(4))).map(Number).join("_") : "", cursor: ""});
  const open = async ({at, value}) => {
    const near = {...in_box({from: at - 0.02, until: at + 0.02, low: Math.max(0, value - 2e-5), high: value + 2e-5}, by), limit: 1};
    const {items: [found]} = await query("requests", near);
    if (found) location.hash = address("request", {id: found.request_id ?? found.trace_id, span: found.span_id});
  };
  const label = `${LATENCIES[by]} of requests that began ${over}`;
  if (!dots.dots) return html`<p class="quiet">${label}</p><p>No request of this time has one.</p>`;
  return html`
    <figure class="of-scatter"><figcaption>
      <label class="beside">Dots<select name="y" value=${by} onChange=${(event) => choose({y: event.target.value, box: "", cursor: ""})}>
        ${Object.entries(LATENCIES).map(([name, text]) => html`<option value=${name}>${text}</option>`)}</select></label>
      <span>${sampled(dots)}</span><${Key} dots=${dots} /></figcaption>
      <${Plot} label=${`${label}: ${sampled(dots)}`} dots=${dots} box=${box} take=${take} open=${open} />
    </figure>
    ${!box && html`<${Note}>Draw a box around dots to compare them with the others, or open one with a click.${
      dots.every > 1 ? " Filter, or choose a shorter time, to see every request." : ""}<//>`}
    <${Numbers} box=${box} dots=${dots} take=${take} />
    ${box && contrast && html`
      <${Awaited} of=${contrast} waiting="Comparing." failed="Not compared"
        show=${(found) => html`<${Compared} contrast=${found} address=${address} parameters=${parameters} />`} />
      <p class="pages"><button type="button" onClick=${() => take(null)}>Remove the box</button>
        <a href=${address("requests", {...parameters, box: "", cursor: "", window: "", from: iso(box.from), until: iso(box.until)})}>Show its time alone</a></p>`}`;
}
