// Small charts. Widths are set through the style object, which the content policy allows.

interface LineProps {
  values: number[];
  label: string;
  /** The top of the chart; the largest value without it. */
  top?: number;
}

const WIDTH = 120;
const HEIGHT = 28;
const POINTS = 120;

/** A line of the last values, newest at the right. */
export function Sparkline({ values, label, top }: LineProps) {
  const highest = top ?? Math.max(...values, 0);
  const x = (index: number) => WIDTH - (values.length - 1 - index) * (WIDTH / (POINTS - 1));
  const y = (value: number) => HEIGHT - 2 - (highest > 0 ? value / highest : 0) * (HEIGHT - 4);
  const points = values.map((value, index) => `${x(index).toFixed(1)},${y(value).toFixed(1)}`);
  const area = `${x(0).toFixed(1)},${HEIGHT} ${points.join(" ")} ${WIDTH},${HEIGHT}`;
  return (
    <svg class="spark" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label={label}>
      {values.length > 1 && <polygon points={area} />}
      {values.length > 1 && <polyline points={points.join(" ")} />}
    </svg>
  );
}

interface MeterProps {
  share: number;
  label: string;
  kind?: string;
}

/** A bar that is filled by a share from 0 to 1. */
export function Meter({ share, label, kind = "" }: MeterProps) {
  const filled = Math.max(0, Math.min(1, share));
  return (
    <span class={`meter ${kind}`} role="meter" aria-label={label} aria-valuemin={0} aria-valuemax={100}
      aria-valuenow={Math.round(100 * filled)}>
      <span style={{ width: `${100 * filled}%` }} />
    </span>
  );
}
