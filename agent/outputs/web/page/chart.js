// Charts by uPlot, in the colours of the page.
import {Component, html} from "./elements.js";

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const HEIGHT = 220;

// `data` is uPlot's: x values, then one list for each of the `series` of {label, colour, ...}.
export class Chart extends Component {
  keep = (place) => { this.place = place ?? this.place; };

  componentDidMount() {
    this.draw();
    this.resized = new ResizeObserver(([{contentRect}]) => {
      const width = Math.floor(contentRect.width);
      if (this.plot && width && width !== this.plot.width) this.plot.setSize({width, height: HEIGHT});
    });
    this.resized.observe(this.place);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.redraw = () => this.draw();
    this.scheme.addEventListener("change", this.redraw);
  }

  componentDidUpdate() {
    if (this.shape !== shape(this.props)) this.draw();
    else this.plot.setData(this.props.data);
  }

  componentWillUnmount() {
    this.scheme.removeEventListener("change", this.redraw);
    this.resized.disconnect();
    this.plot.destroy();
  }

  draw() {
    this.plot?.destroy();
    this.shape = shape(this.props);
    const {data, series, scales = {x: {time: true}, y: {range: from_zero}}, axes = [{}, {}], x = {}} = this.props;
    const drawn = {
      width: Math.max(Math.floor(this.place.clientWidth), 200), height: HEIGHT, scales,
      axes: axes.map((axis) => ({
        stroke: style("--text"), ...["grid", "ticks"].reduce((lines, name) => (
          {...lines, [name]: {stroke: style("--line"), width: 1}}), {}),
        ...axis,
      })),
      series: [x, ...series.map(({colour, points, ...given}) => {
        const stroke = style(colour);
        return {stroke, width: 2, points: {stroke, fill: stroke, ...points}, ...given};
      })],
    };
    this.plot = new uPlot(drawn, data, this.place.querySelector(".plot"));
  }

  render({label}) {
    return html`<figure ref=${this.keep}><figcaption>${label}</figcaption>
      <div class="plot" role="img" aria-label=${label}></div></figure>`;
  }
}

// Heights compare only from zero on.
const from_zero = (_, low, high) => [Math.min(0, low ?? 0), high > 0 ? 1.05 * high : 1];

const shape = ({series, scales}) => JSON.stringify([series.map(({label}) => label), scales]);

// Unix seconds of rows with a time `at`.
export const times = (rows) => rows.map(({at}) => Date.parse(at) / 1000);
