// Numbers as people read them.

const NS_PER_MS = 1e6;

export function duration(ns: number): string {
  const ms = ns / NS_PER_MS;
  if (ms < 0.9995) return `${(ms * 1000).toFixed(0)} µs`;
  if (ms < 10) return `${ms.toFixed(2)} ms`;
  if (ms < 999.5) return `${ms.toFixed(ms < 100 ? 1 : 0)} ms`;
  const seconds = ms / 1000;
  return seconds < 100 ? `${seconds.toFixed(2)} s` : `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

/** For marks of an axis, which are round numbers. */
export function mark(ns: number): string {
  if (ns === 0) return "0";
  const [unit, name] = ns < NS_PER_MS ? [1e3, "µs"] : ns < 1e9 ? [NS_PER_MS, "ms"] : [1e9, "s"];
  return `${Number((ns / unit).toPrecision(3))} ${name}`;
}

export function seconds(value: number | null): string {
  return value === null ? "–" : duration(value * 1e9);
}

export function percent(share: number): string {
  return `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;
}

export function count(value: number): string {
  return value.toLocaleString("en", { maximumFractionDigits: 0 });
}

/** A number with its noun, which is in the singular after 1: "1 token", "2 processes". */
export function counted(value: number, noun: string): string {
  const plural = noun.endsWith("s") ? `${noun}es` : `${noun}s`;
  return `${count(value)} ${value === 1 ? noun : plural}`;
}

/** With at most four digits: 12.4k. */
export function short(value: number): string {
  if (value < 10000) return value.toLocaleString("en", { maximumFractionDigits: value < 100 ? 1 : 0 });
  return value.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 });
}

export function clock(ns: number): string {
  return new Date(ns / NS_PER_MS).toLocaleTimeString([], { hour12: false });
}

/** The end of a long id, which tells ids apart. */
export function shortId(id: string): string {
  return id.length > 22 ? `${id.slice(0, 9)}…${id.slice(-8)}` : id;
}
