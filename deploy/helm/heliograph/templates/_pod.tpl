{{/* The template of a role's pods. Takes (dict "root" $ "role" ROLE "values" VALUES). */}}
{{- define "heliograph.pod" -}}
{{- $root := .root -}}
{{- $v := .root.Values -}}
metadata:
  labels:
    {{- include "heliograph.labels" . | trim | nindent 4 }}
    {{- with .values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # A changed configuration replaces the pod.
    checksum/config: {{ include "heliograph.config" . | trim | sha256sum }}
    {{- with .values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "heliograph.serviceAccount" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add (int64 $v.drainSeconds) (int64 $v.pauseSeconds) 30 }}
  securityContext:
    {{- include "heliograph.podSecurity" $root | nindent 4 }}
  {{- with $v.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with .values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  topologySpreadConstraints:
    {{- with .values.topologySpreadConstraints }}
    {{- toYaml . | nindent 4 }}
    {{- else }}
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "heliograph.selector" . | nindent 10 }}
    {{- end }}
  containers:
    - name: heliograph
      image: {{ include "heliograph.image" $root | quote }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      command: [heliograph]
      args: [serve, --config, /etc/heliograph/heliograph.toml]
      env:
        - name: HOME
          value: /tmp
        - name: PYTHONDONTWRITEBYTECODE
          value: "1"
        - name: XDG_STATE_HOME
          value: /tmp/state
        - name: CUPY_CACHE_DIR
          value: /var/cache/heliograph/cupy
        - name: CUDA_CACHE_PATH
          value: /var/cache/heliograph/cuda
        {{- with .values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - name: grpc
          containerPort: {{ int64 $v.ports.grpc }}
        - name: health
          containerPort: {{ int64 $v.ports.health }}
        {{- if .values.kserve }}
        - name: kserve
          containerPort: {{ int64 $v.ports.kserve }}
        - name: kserve-http
          containerPort: {{ int64 $v.ports.kserveHttp }}
        {{- end }}
        {{- if $v.metrics.enabled }}
        - name: metrics
          containerPort: {{ int64 $v.ports.metrics }}
        {{- end }}
      # Succeeds from the first answer on, also while devices start; the other probes follow.
      startupProbe:
        grpc: {port: {{ int64 $v.ports.health }}, service: live}
        periodSeconds: 2
        timeoutSeconds: 3
        failureThreshold: 60
      livenessProbe:
        grpc: {port: {{ int64 $v.ports.health }}, service: live}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        grpc: {port: {{ int64 $v.ports.health }}, service: ready}
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: 2
      {{- if $v.pauseSeconds }}
      lifecycle:
        preStop:
          sleep:
            seconds: {{ int64 $v.pauseSeconds }}
      {{- end }}
      securityContext:
        {{- include "heliograph.containerSecurity" $root | nindent 8 }}
      resources:
        {{- include "heliograph.resources" .values | nindent 8 }}
      volumeMounts:
        - name: config
          mountPath: /etc/heliograph
          readOnly: true
        - name: cache
          mountPath: /var/cache/heliograph
        {{- if .values.state.volumeSize }}
        - name: state
          mountPath: /var/lib/heliograph
        {{- end }}
        - name: tmp
          mountPath: /tmp
        {{- if $v.tls.enabled }}
        - name: tls
          mountPath: /run/secrets/heliograph/tls
          readOnly: true
        {{- end }}
        {{- if $v.tokens.enabled }}
        - name: tokens
          mountPath: /run/secrets/heliograph/tokens
          readOnly: true
        {{- end }}
        {{- if .values.modelsClaim }}
        - name: models
          mountPath: /srv/models
          readOnly: true
        {{- end }}
  volumes:
    - name: config
      configMap:
        name: {{ include "heliograph.fullname" $root }}-{{ .role }}
    - name: tmp
      emptyDir:
        sizeLimit: 1Gi
    {{- if not .values.cache.persistent }}
    - name: cache
      emptyDir:
        sizeLimit: {{ .values.cache.volumeSize }}
    {{- end }}
    {{- if and .values.state.volumeSize (eq .role "head") }}
    - name: state
      persistentVolumeClaim:
        claimName: {{ include "heliograph.fullname" $root }}-head-state
    {{- end }}
    {{- if $v.tls.enabled }}
    - name: tls
      secret:
        secretName: {{ include "heliograph.tlsSecret" $root }}
        defaultMode: 0440
    {{- end }}
    {{- if $v.tokens.enabled }}
    - name: tokens
      secret:
        secretName: {{ include "heliograph.tokenSecret" $root }}
        defaultMode: 0440
    {{- end }}
    {{- with .values.modelsClaim }}
    - name: models
      persistentVolumeClaim:
        claimName: {{ . }}
        readOnly: true
    {{- end }}
{{- end -}}

{{/* The requirements of Kubernetes' restricted profile for a pod and a container, and a read-only image. */}}
{{- define "heliograph.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ int64 .Values.runAsUser }}
runAsGroup: {{ int64 .Values.runAsUser }}
fsGroup: {{ int64 .Values.runAsUser }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "heliograph.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* The specification of a claim. Takes volumeSize and storageClassName. */}}
{{- define "heliograph.claim" -}}
accessModes: [ReadWriteOnce]
{{- with .storageClassName }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests:
    storage: {{ .volumeSize }}
{{- end -}}

{{/* Resources and requested GPUs, which are limits. Takes a role's values. */}}
{{- define "heliograph.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- if .gpu.count -}}
{{- $limits := default dict $resources.limits -}}
{{- $_ := set $limits .gpu.resource (int64 .gpu.count | toString) -}}
{{- $_ := set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
