{{- define "heliograph.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 48 | trimSuffix "-" -}}
{{- end -}}

{{- define "heliograph.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 48 | trimSuffix "-" -}}
{{- else if contains (include "heliograph.name" .) .Release.Name -}}
{{- .Release.Name | trunc 48 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "heliograph.name" .) | trunc 48 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* The selector of a role's pods. Takes (dict "root" $ "role" ROLE). */}}
{{- define "heliograph.selector" -}}
app.kubernetes.io/name: {{ include "heliograph.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{/* Labels of an object. Takes (dict "root" $ "role" ROLE), or without a role. */}}
{{- define "heliograph.labels" -}}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
app.kubernetes.io/name: {{ include "heliograph.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .role }}
app.kubernetes.io/component: {{ . }}
{{- end }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "heliograph.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "heliograph.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "heliograph.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "heliograph.tlsSecret" -}}
{{- default (printf "%s-tls" (include "heliograph.fullname" .)) .Values.tls.existingSecret -}}
{{- end -}}

{{- define "heliograph.tokenSecret" -}}
{{- default (printf "%s-tokens" (include "heliograph.fullname" .)) .Values.tokens.existingSecret -}}
{{- end -}}

{{/* The DNS name of all members, for which their certificates must be valid. */}}
{{- define "heliograph.membersHost" -}}
{{- printf "%s-members.%s.svc" (include "heliograph.fullname" .) .Release.Namespace -}}
{{- end -}}

{{/* The names that certificates must be valid for, as a YAML list. */}}
{{- define "heliograph.dnsNames" -}}
{{- $full := include "heliograph.fullname" . -}}
- {{ $full }}
- {{ printf "%s.%s" $full .Release.Namespace }}
- {{ printf "%s.%s.svc" $full .Release.Namespace }}
- {{ printf "%s-members" $full }}
- {{ include "heliograph.membersHost" . }}
- {{ printf "*.%s" (include "heliograph.membersHost" .) | quote }}
{{- with .Values.tls.certManager.dnsNames }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Checks that involve several values, which a schema cannot express. */}}
{{- define "heliograph.check" -}}
{{- if and .Values.tls.enabled (not .Values.tls.existingSecret) (not .Values.tls.certManager.enabled) (not (and .Values.tls.certificate .Values.tls.key .Values.tls.ca)) -}}
{{- fail "tls.enabled needs tls.existingSecret, tls.certManager.enabled, or tls.certificate, tls.key and tls.ca" -}}
{{- end -}}
{{- if and .Values.tls.certManager.enabled (not .Values.tls.certManager.issuer.name) -}}
{{- fail "tls.certManager.enabled needs tls.certManager.issuer.name" -}}
{{- end -}}
{{- if and .Values.tokens.enabled (not .Values.tokens.existingSecret) (not (and .Values.tokens.tokens .Values.tokens.poolToken)) -}}
{{- fail "tokens.enabled needs tokens.existingSecret, or tokens.tokens and tokens.poolToken" -}}
{{- end -}}
{{- if and .Values.tokens.enabled (not .Values.tls.enabled) -}}
{{- fail "tokens.enabled needs tls.enabled: without it, tokens would be sent in plain text" -}}
{{- end -}}
{{- if and (not .Values.insecure) (not .Values.tokens.enabled) (not (and .Values.tls.enabled .Values.tls.clientCertificates)) -}}
{{- fail "any client that reaches the pods could use them: enable tokens, or tls with clientCertificates, or set insecure=true" -}}
{{- end -}}
{{- if and .Values.head.kserve (not .Values.head.modelsClaim) -}}
{{- fail "head.kserve needs head.modelsClaim, the claim with the folder of models" -}}
{{- end -}}
{{- if and .Values.head.state.volumeSize (gt (int64 .Values.head.replicas) 1) -}}
{{- fail "head.state is a claim that one head uses: set head.replicas=1" -}}
{{- end -}}
{{- if and .Values.head.state.url (gt (int64 .Values.head.replicas) 1) -}}
{{- fail "head.state.url names a state that one head holds: set head.replicas=1" -}}
{{- end -}}
{{- if and .Values.head.state.url .Values.head.state.volumeSize -}}
{{- fail "the state of the head is in one place: set head.state.url or head.state.volumeSize" -}}
{{- end -}}
{{- if and .Values.metrics.serviceMonitor.enabled (not .Values.metrics.enabled) -}}
{{- fail "metrics.serviceMonitor.enabled needs metrics.enabled" -}}
{{- end -}}
{{- end -}}

{{/* A value in TOML: a text, number, boolean or list of texts. */}}
{{- define "heliograph.toml" -}}
{{- if kindIs "float64" . -}}
{{- if eq (float64 (int64 .)) . }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- else -}}
{{- toJson . -}}
{{- end -}}
{{- end -}}

{{/* heliograph.toml of a role: the settings from the chart's values, overridden by `config`. Takes
(dict "root" $ "role" ROLE "values" VALUES). */}}
{{- define "heliograph.config" -}}
{{- $v := .root.Values -}}
{{- $scheme := ternary "grpcs" "grpc" $v.tls.enabled -}}
{{- $settings := dict
  "listen" (list (printf "%s://%s:%v" $scheme $v.listenHost $v.ports.grpc))
  "health_listen" (printf "%s:%v" $v.listenHost $v.ports.health)
  "insecure" $v.insecure
  "devices" .values.devices
  "shared_memory" false
  "direct_connections" -1
  "drain_seconds" $v.drainSeconds
  "log_level" $v.log.level
  "log_format" $v.log.format
-}}
{{- if $v.metrics.enabled -}}
{{- $_ := set $settings "metrics_listen" (printf "%s:%v" $v.listenHost $v.ports.metrics) -}}
{{- end -}}
{{- with $v.traces -}}
{{- $_ := set $settings "traces" . -}}
{{- end -}}
{{- if $v.tls.enabled -}}
{{- $tls := "/run/secrets/heliograph/tls" -}}
{{- $_ := merge $settings (dict "tls_certificate" (printf "%s/tls.crt" $tls) "tls_key" (printf "%s/tls.key" $tls) "pool_ca" (printf "%s/ca.crt" $tls)) -}}
{{- if $v.tls.clientCertificates -}}
{{- $_ := merge $settings (dict "tls_client_ca" (printf "%s/ca.crt" $tls) "pool_certificate" (printf "%s/tls.crt" $tls) "pool_key" (printf "%s/tls.key" $tls)) -}}
{{- if not $v.tokens.enabled -}}
{{- $_ := set $settings "tls_clients" "clients.toml" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $v.tokens.enabled -}}
{{- $_ := merge $settings (dict "tokens" "/run/secrets/heliograph/tokens/tokens" "pool_token" "/run/secrets/heliograph/tokens/pool_token") -}}
{{- end -}}
{{- with .values.cache.size -}}
{{- $_ := merge $settings (dict "cache" "/var/cache/heliograph/weights" "cache_size" .) -}}
{{- end -}}
{{- if .values.state.volumeSize -}}
{{- /* A folder in the volume, which the daemon makes for its user alone; others may write to the volume itself. */ -}}
{{- $_ := set $settings "state" "/var/lib/heliograph/state" -}}
{{- end -}}
{{- with .values.state.url -}}
{{- $_ := set $settings "state" . -}}
{{- end -}}
{{- if .values.modelsClaim -}}
{{- $_ := set $settings "models" "/srv/models" -}}
{{- end -}}
{{- if .values.kserve -}}
{{- $_ := merge $settings (dict "kserve" (printf "%s%s:%v" (ternary "grpcs://" "" $v.tls.enabled) $v.listenHost $v.ports.kserve) "kserve_http" (printf "%s%s:%v" (ternary "https://" "" $v.tls.enabled) $v.listenHost $v.ports.kserveHttp)) -}}
{{- end -}}
{{- if eq .role "head" -}}
{{- $_ := merge $settings (dict "pool" (include "heliograph.pool" .root) "pool_silence_seconds" .values.poolSilenceSeconds) -}}
{{- end -}}
{{- $settings = mergeOverwrite $settings (deepCopy .values.config) -}}
{{- range $name, $value := $settings -}}
{{- if not (kindIs "map" $value) -}}
{{ $name }} = {{ include "heliograph.toml" $value }}
{{ end -}}
{{- end -}}
{{- range $name, $table := $settings -}}
{{- if kindIs "map" $table }}
[{{ $name }}]
{{ range $key, $value := $table -}}
{{ $key }} = {{ include "heliograph.toml" $value }}
{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The source of the head's members. */}}
{{- define "heliograph.pool" -}}
{{- $scheme := ternary "grpcs://" "" .Values.tls.enabled -}}
{{- printf "dns:%s%s:%v" $scheme (include "heliograph.membersHost" .) .Values.ports.grpc -}}
{{- end -}}
