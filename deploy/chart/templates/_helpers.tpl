{{- define "tokenmesh.name" -}}
{{- if contains "tokenmesh" .Release.Name -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-tokenmesh" .Release.Name | trunc 40 | trimSuffix "-" }}{{- end -}}
{{- end -}}

{{- /* Labels that select the pods of a component: list of root and component. */ -}}
{{- define "tokenmesh.selector" -}}
app.kubernetes.io/name: tokenmesh
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "tokenmesh.labels" -}}
{{ include "tokenmesh.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version }}
{{- end -}}

{{- define "tokenmesh.passwords" -}}
{{ .Values.passwordsSecret | default (printf "%s-passwords" (include "tokenmesh.name" .)) }}
{{- end -}}

{{- define "tokenmesh.natsUrl" -}}
{{- if .Values.nats.enabled -}}nats://{{ include "tokenmesh.name" . }}-nats:4222
{{- else -}}{{ required "nats.externalUrl is required where nats.enabled is false" .Values.nats.externalUrl }}{{- end -}}
{{- end -}}

{{- define "tokenmesh.redisUrl" -}}
{{- if .Values.valkey.enabled -}}redis://{{ include "tokenmesh.name" . }}-valkey:6379/0
{{- else -}}{{ required "valkey.externalUrl is required where valkey.enabled is false" .Values.valkey.externalUrl }}{{- end -}}
{{- end -}}

{{- /* The port of an address, or that of its scheme. */ -}}
{{- define "tokenmesh.port" -}}
{{- $host := (urlParse .).host | splitList "]" | last -}}
{{- (split ":" $host)._1 | default (ternary "443" "80" (hasPrefix "https:" .)) -}}
{{- end -}}

{{- define "tokenmesh.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end -}}

{{- define "tokenmesh.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: { type: RuntimeDefault }
{{- end -}}

{{- /* One password of NATS and Valkey for each service, as variables. */ -}}
{{- define "tokenmesh.passwordVariables" -}}
{{- $root := . -}}
{{- range list "gateway" "tokenizer" "encoder" "scheduler" "worker" }}
- name: {{ upper . }}_PASSWORD
  valueFrom:
    secretKeyRef: { name: {{ include "tokenmesh.passwords" $root | trim }}, key: {{ . }} }
{{- end }}
{{- end -}}

{{- /* The label of a model's workers: those that compute prompts for others have another one, since
selectors of Deployments must not overlap. With the dict of tokenmesh.deployment. */ -}}
{{- define "tokenmesh.modelLabel" -}}
{{ ternary "tokenmesh/prefill-of" "tokenmesh/model" (eq .kvRole "prefill") }}: {{ .slug }}
{{- end -}}

{{- /* The whole Deployment of a service. A dict: root, service, name, replicas, resources, and for
workers the model and the role among others (kvRole), which is empty where no KV is exchanged. */ -}}
{{- define "tokenmesh.deployment" -}}
{{- $root := .root -}}
{{- $service := .service -}}
{{- $model := .model -}}
{{- $gpus := .gpus | default 0 | int -}}
{{- $values := $root.Values -}}
{{- $readsModels := has $service (list "tokenizer" "encoder" "worker") -}}
{{- $repository := printf "%s/tokenmesh-%s" $values.image.registry $service -}}
{{- $digest := index $values.image.digests $service | default "" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .name }}
  labels:
    {{- include "tokenmesh.labels" (list $root $service) | nindent 4 }}
    {{- if $model }}
    {{ include "tokenmesh.modelLabel" . }}
    {{- end }}
spec:
  {{- if not .isScaled }}
  replicas: {{ .replicas }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "tokenmesh.selector" (list $root $service) | nindent 6 }}
      {{- if $model }}
      {{ include "tokenmesh.modelLabel" . }}
      {{- end }}
  strategy:
    type: RollingUpdate
    rollingUpdate:
      # A GPU may be the last one: workers are replaced one by one.
      maxSurge: {{ ternary 0 1 (gt $gpus 0) }}
      maxUnavailable: {{ ternary 1 0 (gt $gpus 0) }}
  template:
    {{- include "tokenmesh.pod" . | nindent 4 }}
{{- end -}}

{{- /* The pod of a service, with the same dict. With `nodes` above 1 it is one of a worker's: they
find each other by the variables of a LeaderWorkerSet, and all but the first only follow. */ -}}
{{- define "tokenmesh.pod" -}}
{{- $root := .root -}}
{{- $service := .service -}}
{{- $model := .model -}}
{{- $gpus := .gpus | default 0 | int -}}
{{- $values := $root.Values -}}
{{- $readsModels := has $service (list "tokenizer" "encoder" "worker") -}}
{{- $repository := printf "%s/tokenmesh-%s" $values.image.registry $service -}}
{{- $digest := index $values.image.digests $service | default "" -}}
metadata:
  labels:
    {{- include "tokenmesh.labels" (list $root $service) | nindent 4 }}
    {{- if $model }}
    {{ include "tokenmesh.modelLabel" . }}
    {{- end }}
    {{- if .kvRole }}
    tokenmesh/kv-of: {{ .slug }}
    {{- end }}
  annotations:
    checksum/config: {{ include (print $root.Template.BasePath "/config.yaml") $root | sha256sum }}
    {{- with $values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  automountServiceAccountToken: false
  {{- with $values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "tokenmesh.selector" (list $root $service) | nindent 10 }}
  securityContext:
    {{- include "tokenmesh.podSecurity" $root | nindent 4 }}
  terminationGracePeriodSeconds: {{ add (int $values.drainGraceSeconds) 20 }}
  containers:
    - name: {{ $service }}
      image: {{ ternary (printf "%s@%s" $repository $digest) (printf "%s:%s" $repository ($values.image.tag | default $root.Chart.AppVersion)) (ne $digest "") | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      {{- if gt (int .nodes) 1 }}
      command:
        - torchrun
        - --nnodes=$(LWS_GROUP_SIZE)
        - --node-rank=$(LWS_WORKER_INDEX)
        - --nproc-per-node={{ .ranksPerNode }}
        - --master-addr=$(LWS_LEADER_ADDRESS)
        - --master-port=29500
        - -m
        - tokenmesh
        - serve
        - worker
        - --config
        - /etc/tokenmesh/{{ .config | default "config" }}.json
      {{- else }}
      command: [tokenmesh, serve, {{ $service }}, --config, /etc/tokenmesh/{{ .config | default "config" }}.json]
      {{- end }}
      {{- if eq $service "gateway" }}
      args: [--host, 0.0.0.0, --port, "8000"{{ if $values.gateway.keysSecret.name }}, --keys-file, /etc/tokenmesh-keys/{{ $values.gateway.keysSecret.key }}{{ end }}]
      {{- end }}
      env:
        - { name: TOKENMESH_BUS__USER, value: {{ $service }} }
        - { name: TOKENMESH_REDIS__USER, value: {{ $service }} }
        {{- range list "BUS" "REDIS" }}
        - name: TOKENMESH_{{ . }}__PASSWORD
          valueFrom:
            secretKeyRef: { name: {{ include "tokenmesh.passwords" $root | trim }}, key: {{ $service }} }
        {{- end }}
        {{- if $values.caSecret }}
        - { name: SSL_CERT_FILE, value: /etc/tokenmesh-ca/ca.crt }
        {{- end }}
        {{- if and $readsModels $values.huggingFaceSecret }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef: { name: {{ $values.huggingFaceSecret }}, key: token }
        {{- end }}
        {{- if eq $service "worker" }}
        - { name: TOKENMESH_WORKER__MODEL, value: {{ $model | quote }} }
        {{- end }}
        {{- with .kvRole }}
        - { name: TOKENMESH_WORKER__KV__ROLE, value: {{ . }} }
        - name: POD_IP
          valueFrom: { fieldRef: { fieldPath: status.podIP } }
        - { name: TOKENMESH_WORKER__KV__LISTEN, value: "$(POD_IP):9400" }
        {{- end }}
        {{- if gt $gpus 0 }}
        # Without a GPU it ends with an error instead of taking the CPU.
        - { name: TOKENMESH_WORKER__DEVICE, value: cuda }
        - { name: TRITON_CACHE_DIR, value: /triton }
        {{- end }}
      ports:
        - { name: metrics, containerPort: 9464 }
        {{- if .kvRole }}
        - { name: kv, containerPort: 9400 }
        {{- end }}
        {{- if eq $service "gateway" }}
        - { name: http, containerPort: 8000 }
        {{- end }}
      {{- if not .follows }}
      {{- if eq $service "gateway" }}
      startupProbe:
        httpGet: { path: /livez, port: http }
        periodSeconds: 2
        failureThreshold: 60
      livenessProbe:
        httpGet: { path: /livez, port: http }
        periodSeconds: 10
        timeoutSeconds: 5
      readinessProbe:
        httpGet: { path: /readyz, port: http }
        periodSeconds: 5
        timeoutSeconds: 3
      lifecycle:
        # Endpoints forget the pod before it stops to listen.
        preStop:
          exec: { command: [sleep, "5"] }
      {{- else }}
      # Ready once it answers on its control subject, which it does after it has loaded its model.
      startupProbe:
        exec:
          command:
            - python
            - -c
            - |
              import urllib.request as u
              text = u.urlopen("http://127.0.0.1:9464/metrics", timeout=4).read()
              raise SystemExit(b'actor="ProcessControl"' not in text)
        periodSeconds: 5
        timeoutSeconds: 8
        failureThreshold: 720
      livenessProbe:
        httpGet: { path: /metrics, port: metrics }
        periodSeconds: 15
        timeoutSeconds: 10
        failureThreshold: 4
      {{- if eq $service "worker" }}
      lifecycle:
        # SIGTERM drains: running requests finish, the rest moves. Replacements are seen first.
        preStop:
          exec: { command: [sleep, "1"] }
      {{- end }}
      {{- end }}
      {{- end }}
      securityContext:
        {{- include "tokenmesh.containerSecurity" $root | nindent 8 }}
      {{- $resources := deepCopy .resources }}
      {{- if gt $gpus 0 }}
      {{- $limits := merge (dict "nvidia.com/gpu" $gpus) ($resources.limits | default dict) }}
      {{- $resources = merge (dict "limits" $limits) $resources }}
      {{- end }}
      resources: {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - { name: tmp, mountPath: /tmp }
        - { name: config, mountPath: /etc/tokenmesh, readOnly: true }
        {{- if $values.caSecret }}
        - { name: ca, mountPath: /etc/tokenmesh-ca, readOnly: true }
        {{- end }}
        {{- if $readsModels }}
        - { name: models, mountPath: /models }
        {{- end }}
        {{- if gt $gpus 0 }}
        - { name: triton, mountPath: /triton }
        {{- end }}
        {{- if and (eq $service "gateway") $values.gateway.keysSecret.name }}
        - { name: keys, mountPath: /etc/tokenmesh-keys, readOnly: true }
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: { sizeLimit: 2Gi }
    - name: config
      configMap: { name: {{ include "tokenmesh.name" $root }}-config }
    {{- if $values.caSecret }}
    - name: ca
      secret: { secretName: {{ $values.caSecret }} }
    {{- end }}
    {{- if $readsModels }}
    - name: models
      {{- if $values.modelCache.existingClaim }}
      persistentVolumeClaim: { claimName: {{ $values.modelCache.existingClaim }} }
      {{- else }}
      emptyDir: { sizeLimit: {{ $values.modelCache.sizeLimit }} }
      {{- end }}
    {{- end }}
    {{- if gt $gpus 0 }}
    - name: triton
      emptyDir: { sizeLimit: 2Gi }
    {{- end }}
    {{- if and (eq $service "gateway") $values.gateway.keysSecret.name }}
    - name: keys
      secret: { secretName: {{ $values.gateway.keysSecret.name }} }
    {{- end }}
{{- end -}}

{{- /* Workers of several pods, with the same dict: a group of `nodes` pods for each. A pod that ends
takes its group with it, since no rank goes on without the others. */ -}}
{{- define "tokenmesh.groups" -}}
{{- $root := .root -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  name: {{ .name }}
  labels:
    {{- include "tokenmesh.labels" (list $root "worker") | nindent 4 }}
    tokenmesh/model: {{ .slug }}
spec:
  replicas: {{ .replicas }}
  startupPolicy: LeaderCreated
  leaderWorkerTemplate:
    size: {{ .nodes }}
    restartPolicy: RecreateGroupOnPodRestart
    leaderTemplate:
      {{- include "tokenmesh.pod" . | nindent 6 }}
    workerTemplate:
      {{- include "tokenmesh.pod" (merge (dict "follows" true) .) | nindent 6 }}
{{- end -}}

{{- /* A name for a model in names of Kubernetes: dict of name. */ -}}
{{- define "tokenmesh.slug" -}}
{{- $plain := regexReplaceAll "[^a-z0-9-]" (lower .name) "-" | trimAll "-" | trunc 24 | trimAll "-" -}}
{{- if eq $plain .name }}{{ $plain }}{{ else }}{{ $plain }}-{{ sha256sum .name | trunc 6 }}{{ end -}}
{{- end -}}
