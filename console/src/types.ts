// What the gateway answers with.

export interface WorkerState {
  running: number;
  waiting: number;
  max_num_seqs: number;
  queued_tokens: number;
  kv_blocks_used: number;
  kv_blocks_total: number;
  prefill_tokens_per_s: number;
  step_s: number;
  preemptions: number;
  prefill_tokens: number;
  decode_tokens: number;
  cached_tokens: number;
  sleep_level: number;
  kv_leases: number;
}

export interface ProcessState {
  id: string;
  service: string;
  version: string;
  draining: boolean;
  late: boolean;
  queued: number;
  models: string[];
  kv_role: string;
  kv_tiers: string[];
  load: WorkerState | null;
}

export interface ModelState {
  name: string;
  max_model_len: number;
  generates: boolean;
  takes_images: boolean;
  tasks: string[];
  draft_method: string;
  max_drafts: number;
  parent: string | null;
}

export interface RunningRequest {
  id: string;
  path: string;
  tenant: string;
  model: string | null;
  phase: "preparing" | "placing" | "prefill" | "generating";
  age_s: number;
  workers: string[];
  prompt_tokens: number;
  output_tokens: number;
  max_tokens: number;
}

export interface Health {
  workers: number;
  workers_up: number;
  streams: number;
  waiting: number;
  queued: number;
  kv_used: number;
  tokens_per_s: number | null;
  prompt_tokens_per_s: number | null;
  cached_tokens_per_s: number | null;
  requests: number;
  errors: number;
  refused: number;
  ttft_p50_s: number | null;
  ttft_p95_s: number | null;
}

export interface MeshState {
  health: Health;
  num_processes: number;
  processes: ProcessState[];
  other_protocols: string[];
  tenant_streams: Record<string, number>;
  num_spans: number;
}

export interface ConsoleState {
  gateway: string;
  version: string;
  tenant: string;
  is_admin: boolean;
  can_manage: boolean;
  models: ModelState[];
  requests: { total: number; newest: RunningRequest[] };
  mesh: MeshState | null;
}

export type Value = string | number | boolean | null | Value[];

export interface SpanEvent {
  name: string;
  time_ns: number;
  attributes: Record<string, Value>;
}

export interface Span {
  name: string;
  service: string;
  instance: string;
  span_id: string;
  parent_id: string | null;
  start_ns: number;
  end_ns: number;
  attributes: Record<string, Value>;
  events: SpanEvent[];
  status: string;
  status_message: string;
}

export interface Trace {
  trace_id: string;
  request_id: string | null;
  dropped_spans: number;
  spans: Span[];
}

export interface TraceSummary {
  trace_id: string;
  request_id: string | null;
  name: string;
  attributes: Record<string, Value>;
  start_ns: number;
  end_ns: number;
  num_spans: number;
  services: string[];
  has_error: boolean;
}

export interface ModelUsage {
  model: string;
  requests: number;
  prompt_tokens: number;
  cached_tokens: number;
  completion_tokens: number;
}

export interface TenantUsage {
  tenant: string;
  month: string;
  total_tokens: number;
  monthly_tokens: number | null;
  tokens_left: number | null;
  models: ModelUsage[];
}
