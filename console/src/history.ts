// The last minutes of the mesh's health, for the small charts.

import type { Health } from "./types";

const MOST = 120;
const STEP_MS = 1000;

export type Numbers = { [K in keyof Health]: Health[K] extends number | null ? K : never }[keyof Health];

/** One value per second; seconds without a message repeat the last one. */
export class History {
  private points: Health[] = [];
  private last_ms = 0;

  note(health: Health): void {
    const now = performance.now();
    const missed = this.points.length ? Math.floor((now - this.last_ms) / STEP_MS) : 1;
    if (missed < 1) {
      this.points[this.points.length - 1] = health;
      return;
    }
    const before = this.points[this.points.length - 1] ?? health;
    for (let each = 1; each < Math.min(missed, MOST); each += 1) this.points.push(before);
    this.points.push(health);
    this.points.splice(0, this.points.length - MOST);
    this.last_ms = now;
  }

  values(name: Numbers): number[] {
    return this.points.map((point) => point[name] ?? 0);
  }
}
