{{/*
What a pod with the agent holds. Of a chart that has this one as a dependency:

  {{- include "goodput-agent.initContainers" (index .Subcharts "goodput-agent") | nindent 8 }}
*/}}

{{/* The agent's settings: the chart's, and over them those of the values. */}}
{{- define "goodput-agent.settings" -}}
{{- $values := .Values -}}
{{- if or (hasKey $values.settings "listen") (hasKey (default dict $values.settings.proxy) "listen") -}}
{{- fail "settings: listen and proxy.listen follow from the chart's ports; set sidecar.proxy" -}}
{{- end -}}
{{- $ports := include "goodput-agent.ports" . | fromYaml -}}
{{- $settings := dict
  "listen" (dict "host" "0.0.0.0" "port" $ports.agent)
  "security" (dict "read_tokens" "/etc/goodput-agent-tokens/read")
  "storage" (dict "file" "/data/goodput.db")
  "nvml" (dict "enabled" false)
-}}
{{- if eq $values.mode "node" -}}
{{- /* The node comes by the environment. */ -}}
{{- $kubernetes := dict
  "selector" $values.node.selector
  "namespaces" (include "goodput-agent.watched" . | fromJsonArray)
  "port" $values.node.port
  "name" $values.node.engineName
-}}
{{- $_ := set $settings "engines_from" (dict "kubernetes" $kubernetes) -}}
{{- $_ := set $settings.security "ingest_tokens" "/etc/goodput-agent-tokens/ingest" -}}
{{- $_ := set $settings "otlp" (dict "grpc" "0.0.0.0:4317" "http" "0.0.0.0:4318") -}}
{{- else -}}
{{- $_ := set $settings "engines" (list (dict
  "name" $values.sidecar.engine.name
  "url" (printf "http://127.0.0.1:%v" $values.sidecar.engine.port))) -}}
{{- if $values.sidecar.proxy.enabled -}}
{{- $_ := set $settings "proxy" (dict "listen" (printf "0.0.0.0:%v" $values.sidecar.proxy.port)) -}}
{{- end -}}
{{- end -}}
{{- mustMergeOverwrite $settings (deepCopy $values.settings) | toYaml -}}
{{- end -}}

{{/* The numbers of the agent's ports by name. */}}
{{- define "goodput-agent.ports" -}}
agent: 9470
{{- if eq .Values.mode "node" }}
otlp-grpc: 4317
otlp-http: 4318
{{- else if .Values.sidecar.proxy.enabled }}
proxy: {{ .Values.sidecar.proxy.port }}
{{- end }}
{{- end -}}

{{/* Annotations of the pod: a change of the settings makes a new pod. */}}
{{- define "goodput-agent.podAnnotations" -}}
goodput-agent/settings: {{ include "goodput-agent.settings" . | sha256sum | trunc 16 }}
{{- with .Values.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The environment of the agent's container, with the URL of the shared database from its Secret: a list, or nothing. */}}
{{- define "goodput-agent.environment" -}}
{{- $environment := list -}}
{{- with include "goodput-agent.databaseSecret" . -}}
{{- $key := dict "name" . "key" $.Values.database.key -}}
{{- $environment = append $environment (dict "name" "GOODPUT_STORAGE__PUBLISH_TO" "valueFrom" (dict "secretKeyRef" $key)) -}}
{{- end -}}
{{- $fields := dict -}}
{{- if eq .Values.mode "node" -}}
{{- $fields = dict
  "GOODPUT_NAME" "spec.nodeName"
  "GOODPUT_ENGINES_FROM__KUBERNETES__NODE" "spec.nodeName"
  "NODE_IP" "status.hostIP" -}}
{{- else if .Values.dcgm.url -}}
{{- $fields = dict "NODE_IP" "status.hostIP" "POD_NAME" "metadata.name" "POD_NAMESPACE" "metadata.namespace" -}}
{{- end -}}
{{- range $name, $field := $fields -}}
{{- $environment = append $environment (dict "name" $name "valueFrom" (dict "fieldRef" (dict "fieldPath" $field))) -}}
{{- end -}}
{{- with .Values.dcgm.url -}}
{{- /* The kubelet fills in what stands above. */ -}}
{{- $environment = append $environment (dict "name" "GOODPUT_DCGM__URL" "value" .) -}}
{{- if ne $.Values.mode "node" -}}
{{- range list "GOODPUT_DCGM__POD" "GOODPUT_ENGINES__0__POD" -}}
{{- $environment = append $environment (dict "name" . "value" "$(POD_NAMESPACE)/$(POD_NAME)") -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with concat $environment .Values.env -}}
{{- toYaml . -}}
{{- end -}}
{{- end -}}

{{/* The security context of a container: what the values add, but no more rights. */}}
{{- define "goodput-agent.securityContext" -}}
{{- $fixed := dict
  "runAsNonRoot" true
  "allowPrivilegeEscalation" false
  "readOnlyRootFilesystem" true
  "capabilities" (dict "drop" (list "ALL")) -}}
{{- $preset := dict "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- mustMergeOverwrite $preset (deepCopy .Values.securityContext) $fixed | toYaml -}}
{{- end -}}

{{/*
The security context of a pod that the chart makes. A fixed user is one of vLLM's image: without it the
image decides, or the cluster, as OpenShift does.
*/}}
{{- define "goodput-agent.podSecurityContext" -}}
{{- $preset := dict "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- with .user -}}
{{- $preset = merge $preset (dict "runAsUser" . "runAsGroup" 0 "fsGroup" .) -}}
{{- end -}}
{{- mustMergeOverwrite $preset (deepCopy .root.Values.podSecurityContext) (dict "runAsNonRoot" true) | toYaml -}}
{{- end -}}

{{/* Where the pods with `labels` run: what is set of `values`, which are those of node, vllm or serve. */}}
{{- define "goodput-agent.placement" -}}
{{- $labels := .labels -}}
{{- $placement := dict "imagePullSecrets" .root.Values.imagePullSecrets -}}
{{- $placement = merge $placement (pick .values "serviceAccountName" "priorityClassName" "runtimeClassName" "nodeSelector" "tolerations" "affinity") -}}
{{- $spread := list -}}
{{- range .values.topologySpreadConstraints -}}
{{- $spread = append $spread (merge (deepCopy .) (dict "labelSelector" (dict "matchLabels" $labels))) -}}
{{- end -}}
{{- $_ := set $placement "topologySpreadConstraints" $spread -}}
{{- range $key, $value := $placement -}}
{{- if $value }}
{{ dict $key $value | toYaml }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The settings of `serve`: how long the agents keep rows, and over them its own. */}}
{{- define "goodput-agent.serveSettings" -}}
{{- if hasKey .Values.serve.settings "listen" -}}
{{- fail "serve.settings: listen follows from the chart's port" -}}
{{- end -}}
{{- $settings := dict
  "listen" (dict "host" "0.0.0.0" "port" 9470)
  "security" (dict "read_tokens" "/etc/goodput-agent-tokens/read")
  "storage" (pick (default dict .Values.settings.storage) "keep_requests" "keep_rollups" "query_timeout")
-}}
{{- mustMergeOverwrite $settings (deepCopy .Values.serve.settings) | toYaml -}}
{{- end -}}

{{/*
Whether the agent of a pod is a native sidecar: an init container that goes on running. It starts before
the engine and ends after it.
*/}}
{{- define "goodput-agent.isNative" -}}
{{- if eq .Values.sidecar.native "always" -}}
true
{{- else if eq .Values.sidecar.native "auto" -}}
{{- ternary "true" "" (semverCompare ">=1.29.0-0" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}

{{/* A list of one container, for `initContainers`, where the agent is a native sidecar; else nothing. */}}
{{- define "goodput-agent.initContainers" -}}
{{- if include "goodput-agent.isNative" . -}}
{{- include "goodput-agent.container" (merge (dict "native" true) .) -}}
{{- end -}}
{{- end -}}

{{/* A list of one container, for `containers`, where it is not. */}}
{{- define "goodput-agent.containers" -}}
{{- if not (include "goodput-agent.isNative" .) -}}
{{- include "goodput-agent.container" . -}}
{{- end -}}
{{- end -}}

{{- define "goodput-agent.container" -}}
- name: agent
  image: {{ include "goodput-agent.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  {{- if .native }}
  restartPolicy: Always
  {{- end }}
  {{- $environment := include "goodput-agent.environment" . }}
  {{- with $environment }}
  env:
    {{- . | nindent 4 }}
  {{- end }}
  ports:
    {{- range $name, $port := include "goodput-agent.ports" . | fromYaml }}
    - {name: {{ $name }}, containerPort: {{ $port }}}
    {{- end }}
  # The first start of a new version migrates the database before the agent listens.
  {{- if not .native }}
  startupProbe:
    httpGet: {path: /healthz, port: agent}
    periodSeconds: 2
    failureThreshold: 900
  {{- end }}
  livenessProbe:
    httpGet: {path: /healthz, port: agent}
    {{- if .native }}
    # A startup probe would hold back the engine.
    initialDelaySeconds: 1800
    {{- end }}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  {{- if eq .Values.mode "node" }}
  readinessProbe:
    httpGet: {path: /readyz, port: agent}
    periodSeconds: 10
    timeoutSeconds: 5
  {{- else }}
  # No readiness probe: a store that is away must not take vLLM out of its Service.
  {{- end }}
  resources:
    {{- toYaml .Values.resources | nindent 4 }}
  securityContext:
    {{- include "goodput-agent.securityContext" . | nindent 4 }}
  volumeMounts:
    - {name: goodput-settings, mountPath: /etc/goodput-agent, readOnly: true}
    - {name: goodput-tokens, mountPath: /etc/goodput-agent-tokens, readOnly: true}
    - {name: goodput-data, mountPath: /data}
    - {name: goodput-tmp, mountPath: /tmp}
    {{- with .Values.volumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* A list of the volumes that the container mounts. */}}
{{- define "goodput-agent.volumes" -}}
- {name: goodput-settings, configMap: {name: {{ include "goodput-agent.fullname" . }}-settings}}
# Readable for any user, because the pod decides as whom the agent runs.
- {name: goodput-tokens, secret: {secretName: {{ include "goodput-agent.tokensSecret" . }}, defaultMode: 0444}}
{{- with include "goodput-agent.dataClaim" . }}
- {name: goodput-data, persistentVolumeClaim: {claimName: {{ . }}}}
{{- else }}
- {name: goodput-data, emptyDir: {}}
{{- end }}
- {name: goodput-tmp, emptyDir: {}}
{{- with .Values.volumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
