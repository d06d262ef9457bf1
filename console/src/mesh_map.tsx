// Services in the order of a request's path, with their instances.

import { useState } from "preact/hooks";
import { call } from "./api";
import { Meter } from "./chart";
import { count, counted, percent, short } from "./format";
import { tone } from "./spans";
import type { ConsoleState, MeshState, ModelState, ProcessState, WorkerState } from "./types";

const ORDER = ["gateway", "tokenizer", "encoder", "scheduler", "worker"];
const WORK: Record<string, string> = {
  gateway: "HTTP, streams, recovery",
  tokenizer: "templates, token ids, media",
  encoder: "images to embeddings",
  scheduler: "chooses the worker",
  worker: "the engine",
};

export function MeshMap({ state, mesh }: { state: ConsoleState; mesh: MeshState }) {
  const services = [...new Set([...ORDER, ...mesh.processes.map((each) => each.service)])];
  const [error, setError] = useState("");
  const hidden = mesh.num_processes - mesh.processes.length;
  return (
    <section class="panel" aria-labelledby="map-title">
      <h2 id="map-title">Services <span class="dim">{counted(mesh.num_processes, "process")}</span></h2>
      {error && <p class="error" role="alert">{error}</p>}
      <div class="map">
        {services.map((service) => (
          <Service key={service} name={service} models={state.models} canManage={state.can_manage} onError={setError}
            processes={mesh.processes.filter((each) => each.service === service)} />
        ))}
      </div>
      {hidden > 0 && <p class="dim">{count(hidden)} more {hidden === 1 ? "process is" : "processes are"} not shown.</p>}
      {mesh.other_protocols.length > 0 && (
        <p class="error">Ignored, because they use another protocol: {mesh.other_protocols.join(", ")}</p>
      )}
      {!state.can_manage && (
        <p class="dim">Read-only: draining needs an admin key and a gateway with --enable-admin-routes.</p>
      )}
    </section>
  );
}

interface ServiceProps {
  name: string;
  models: ModelState[];
  processes: ProcessState[];
  canManage: boolean;
  onError(message: string): void;
}

function Service({ name, models, processes, canManage, onError }: ServiceProps) {
  return (
    <div class={`service ${tone(name)}`}>
      <h3>{name}</h3>
      <p class="dim">{WORK[name] ?? ""}</p>
      <div class="instances">
        {processes.length === 0 && <p class="instance none">none</p>}
        {processes.map((each) => (
          <Instance key={each.id} process={each} models={models} canManage={canManage} onError={onError} />
        ))}
      </div>
    </div>
  );
}

function stateOf(process: ProcessState): string {
  if (process.draining) return "draining";
  if (process.late) return "late";
  return process.load?.sleep_level ? "asleep" : "up";
}

interface InstanceProps {
  process: ProcessState;
  models: ModelState[];
  canManage: boolean;
  onError(message: string): void;
}

function Instance({ process, models, canManage, onError }: InstanceProps) {
  const state = stateOf(process);
  return (
    <div class={`instance ${state}`}>
      <p class="head">
        <b title={process.id}>{process.id.replace(`${process.service}-`, "")}</b>
        <span class={`pill ${state}`}>{state}</span>
      </p>
      <p class="dim">version {process.version}{process.queued > 0 && `, ${count(process.queued)} queued`}</p>
      {process.load && <Load load={process.load} process={process} models={models} />}
      {canManage && !process.draining && <Drain id={process.id} onError={onError} />}
    </div>
  );
}

function Load({ load, process, models }: { load: WorkerState; process: ProcessState; models: ModelState[] }) {
  const names = process.models;
  const drafting = models.filter((each) => each.draft_method !== "" && names.includes(each.name));
  const kv = load.kv_blocks_used / Math.max(1, load.kv_blocks_total);
  const seats = load.running / Math.max(1, load.max_num_seqs);
  return (
    <>
      <p class="model">{names.join(", ")}</p>
      <dl class="load">
        <dt>streams</dt>
        <dd><Meter share={seats} label="Streams" /> {load.running}/{load.max_num_seqs}</dd>
        <dt>KV</dt>
        <dd><Meter share={kv} label="KV cache" /> {percent(kv)}</dd>
        {load.waiting > 0 && <><dt>waiting</dt><dd>{count(load.waiting)}</dd></>}
        {load.step_s > 0 && <><dt>step</dt><dd>{(1000 * load.step_s).toFixed(1)} ms</dd></>}
        {load.prefill_tokens_per_s > 0 && (
          <><dt>prefill</dt><dd>{short(load.prefill_tokens_per_s)} tokens/s</dd></>
        )}
        {drafting.length > 0 && (
          <><dt>drafts</dt><dd>{drafting.map((each) => `${each.draft_method}, ${each.max_drafts} at most`).join("; ")}</dd></>
        )}
        {process.kv_role !== "" && (
          <><dt>role</dt><dd>{process.kv_role}{load.kv_leases > 0 && `, ${count(load.kv_leases)} leases`}</dd></>
        )}
        {process.kv_tiers.length > 0 && <><dt>tiers</dt><dd>{process.kv_tiers.join(", ")}</dd></>}
        {load.preemptions > 0 && <><dt>preempted</dt><dd>{count(load.preemptions)}</dd></>}
      </dl>
    </>
  );
}

/** Two presses: the second one within a few seconds drains. */
function Drain({ id, onError }: { id: string; onError(message: string): void }) {
  const [isSure, setSure] = useState(false);
  const press = async () => {
    if (!isSure) {
      setSure(true);
      setTimeout(() => setSure(false), 4000);
      return;
    }
    setSure(false);
    try {
      await call(`mesh/${encodeURIComponent(id)}/drain`, { method: "POST" });
      onError("");
    } catch (error) {
      onError((error as Error).message);
    }
  };
  return (
    <button class={`small ${isSure ? "danger" : ""}`} onClick={press}
      aria-label={isSure ? `Drain ${id} now` : `Drain ${id}`}>
      {isSure ? "Drain: sure?" : "Drain"}
    </button>
  );
}
