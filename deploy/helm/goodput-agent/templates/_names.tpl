{{/* The name of the chart's objects, at most 50 characters, so that a suffix fits. */}}
{{- define "goodput-agent.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "goodput-agent.labels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: goodput-agent
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The labels of the pods with the agent, by which others select them. */}}
{{- define "goodput-agent.podLabels" -}}
{{- if eq .Values.mode "node" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: node
{{- else -}}
{{- toYaml (default (dict "app.kubernetes.io/name" "vllm") .Values.sidecar.podLabels) -}}
{{- if .Values.vllm.enabled }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The labels by which the ServiceMonitor selects the agents' Service, and not that of `serve`. */}}
{{- define "goodput-agent.serviceLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: agent
{{- end -}}

{{/* The labels of the pods of `serve`. */}}
{{- define "goodput-agent.serveLabels" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: serve
{{- end -}}

{{/* The service account of the agents on nodes. */}}
{{- define "goodput-agent.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "goodput-agent.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name: name the account that the agents use, or set serviceAccount.create to true" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* The namespaces whose pods are watched, as a JSON list; empty: all. */}}
{{- define "goodput-agent.watched" -}}
{{- ternary list (default (list .Release.Namespace) .Values.node.namespaces) .Values.node.clusterWide | toJson -}}
{{- end -}}

{{- define "goodput-agent.image" -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}

{{/* The Secret with the tokens. What is wrong with a token is said without showing it. */}}
{{- define "goodput-agent.tokensSecret" -}}
{{- range $key := list "read" "ingest" -}}
{{- with index $.Values.tokens $key -}}
{{- if not (regexMatch "^[!-~]{16,}$" .) -}}
{{- fail (printf "tokens.%s: a token has 16 characters or more, and no space" $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.mode "node") (ne (empty .Values.tokens.read) (empty .Values.tokens.ingest)) -}}
{{- fail "tokens: with mode node set both read and ingest, or neither" -}}
{{- end -}}
{{- if .Values.tokens.read -}}
{{- include "goodput-agent.fullname" . }}-tokens
{{- else -}}
{{- required "tokens: set existingSecret to the name of a Secret with the key read, or read to a token" .Values.tokens.existingSecret -}}
{{- end -}}
{{- end -}}

{{/* The Secret with the URL of the shared database; empty: SQLite. */}}
{{- define "goodput-agent.databaseSecret" -}}
{{- if and .Values.database.url .Values.database.existingSecret -}}
{{- fail "database: set url or existingSecret, not both" -}}
{{- end -}}
{{- if .Values.database.url -}}
{{- if not (regexMatch "^(postgresql|clickhousedb)://" .Values.database.url) -}}
{{- fail "database.url: write postgresql://user:password@host/database, or clickhousedb://" -}}
{{- end -}}
{{- include "goodput-agent.fullname" . }}-database
{{- else -}}
{{- .Values.database.existingSecret -}}
{{- end -}}
{{- end -}}

{{/* The claim of the data volume; empty: an emptyDir. */}}
{{- define "goodput-agent.dataClaim" -}}
{{- if and .Values.data.createClaim .Values.data.existingClaim -}}
{{- fail "data: set createClaim or existingClaim, not both" -}}
{{- end -}}
{{- if and (eq .Values.mode "node") (or .Values.data.createClaim .Values.data.existingClaim) -}}
{{- fail "data: the agents of several nodes cannot share a claim; set database instead" -}}
{{- end -}}
{{- if .Values.data.createClaim -}}
{{- include "goodput-agent.fullname" . }}-data
{{- else -}}
{{- .Values.data.existingClaim -}}
{{- end -}}
{{- end -}}
