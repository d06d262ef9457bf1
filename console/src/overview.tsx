// The mesh now: health, services and their instances, and the requests that run.

import { Sparkline } from "./chart";
import { count, percent, seconds, short } from "./format";
import type { History } from "./history";
import { MeshMap } from "./mesh_map";
import { Running } from "./running";
import type { ConsoleState, Health } from "./types";

interface Props {
  state: ConsoleState;
  history: History;
}

export function Overview({ state, history }: Props) {
  return (
    <>
      <h1 class="hidden">Overview</h1>
      {state.mesh ? (
        <HealthStrip health={state.mesh.health} history={history} />
      ) : (
        <p class="note">
          This key belongs to the tenant <b>{state.tenant}</b>: you see its requests. The services
          of the mesh are shown to admin keys.
        </p>
      )}
      <Running state={state} />
      {state.mesh && <MeshMap state={state} mesh={state.mesh} />}
    </>
  );
}

function HealthStrip({ health, history }: { health: Health; history: History }) {
  const isDegraded = health.workers_up < health.workers || !health.workers;
  return (
    <section aria-label="Health" class="strip">
      <Tile title="Workers" value={`${health.workers_up}/${health.workers}`} isBad={isDegraded}
        note={health.workers ? (isDegraded ? "draining or asleep" : "all up") : "no worker"} />
      <Tile title="Streams" value={count(health.streams)} note={`${count(health.waiting)} waiting in workers`}>
        <Sparkline values={history.values("streams")} label="Streams in the last two minutes" />
      </Tile>
      <Tile title="Queue" value={count(health.queued)} isBad={health.queued > 0} note="waiting for a worker">
        <Sparkline values={history.values("queued")} label="Queue in the last two minutes" />
      </Tile>
      <Tile title="KV cache" value={percent(health.kv_used)} isBad={health.kv_used > 0.95} note="of all blocks">
        <Sparkline values={history.values("kv_used")} top={1} label="KV cache use in the last two minutes" />
      </Tile>
      <Tile title="Tokens/s" value={health.tokens_per_s === null ? "–" : short(health.tokens_per_s)}
        note={`${short(health.prompt_tokens_per_s ?? 0)} prompt tokens/s`}>
        <Sparkline values={history.values("tokens_per_s")} label="Tokens per second in the last two minutes" />
      </Tile>
      <Tile title="First token, p50" value={seconds(health.ttft_p50_s)} note={`p95 ${seconds(health.ttft_p95_s)}`}>
        <Sparkline values={history.values("ttft_p95_s")} label="95th percentile in the last two minutes" />
      </Tile>
      <Tile title="Errors in a minute" value={count(health.errors)} isBad={health.errors > 0}
        note={`requests: ${count(health.requests)}, refused: ${count(health.refused)}`} />
    </section>
  );
}

interface TileProps {
  title: string;
  value: string;
  note: string;
  isBad?: boolean;
  children?: preact.ComponentChildren;
}

function Tile({ title, value, note, isBad = false, children }: TileProps) {
  return (
    <div class={`tile ${isBad ? "bad" : ""}`}>
      <h2>{title}</h2>
      <p class="value">{value}</p>
      {children}
      <p class="dim">{note}</p>
    </div>
  );
}
