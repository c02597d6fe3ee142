{{/* The one pod of the chart: `lmhead serve` with the GPUs of one host. */}}

{{- define "lmhead.serveArgs" -}}
- serve
- --listen=0.0.0.0:{{ .Values.ports.grpc }}
- --metrics_listen=0.0.0.0:{{ .Values.ports.metrics }}
- --backend={{ gt (int .Values.gpu.count) 0 | ternary "cuda" "cpu" }}
- --shutdown_timeout_seconds={{ .Values.drainTimeoutSeconds }}
{{- range $name, $value := .Values.flags }}
- {{ printf "--%s=%v" $name (kindIs "float64" $value | ternary (toJson $value) $value) | quote }}
{{- end }}
{{- end -}}

{{/* Health comes over the plaintext port of grpc.health.v1: the kubelet's gRPC probe speaks no TLS and takes no port's name. */}}
{{- define "lmhead.probe" -}}
grpc:
  port: {{ .port }}
  service: {{ .service }}
{{ toYaml .settings }}
{{- end -}}

{{- define "lmhead.container" -}}
name: lmhead
image: {{ include "lmhead.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args:
  {{- include "lmhead.serveArgs" . | nindent 2 }}
env:
  # Waiting OpenMP threads sleep: they share the container's processors with gRPC.
  - name: OMP_WAIT_POLICY
    value: PASSIVE
  {{- with .Values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - name: grpc
    containerPort: {{ .Values.ports.grpc }}
  - name: metrics
    containerPort: {{ .Values.ports.metrics }}
startupProbe:
  {{- include "lmhead.probe" (dict "port" .Values.ports.grpc "service" "readiness" "settings" .Values.probes.startup) | nindent 2 }}
readinessProbe:
  {{- include "lmhead.probe" (dict "port" .Values.ports.grpc "service" "readiness" "settings" .Values.probes.readiness) | nindent 2 }}
livenessProbe:
  {{- include "lmhead.probe" (dict "port" .Values.ports.grpc "service" "liveness" "settings" .Values.probes.liveness) | nindent 2 }}
resources:
  {{- include "lmhead.resources" . | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
volumeMounts:
  - name: shm
    mountPath: /dev/shm
  - name: tmp
    mountPath: /tmp
{{- end -}}

{{/* A GPU is a limit; Kubernetes makes it the request, too. */}}
{{- define "lmhead.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- if gt (int .Values.gpu.count) 0 -}}
{{- $limits := set (default dict $resources.limits) .Values.gpu.resource (int .Values.gpu.count) -}}
{{- $resources = set $resources "limits" $limits -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "lmhead.tolerations" -}}
{{- if .Values.tolerations -}}
{{- toYaml .Values.tolerations -}}
{{- else if gt (int .Values.gpu.count) 0 -}}
- key: {{ .Values.gpu.resource }}
  operator: Exists
  effect: NoSchedule
{{- end -}}
{{- end -}}

{{- define "lmhead.podTemplate" -}}
{{- $least := add (int .Values.drainTimeoutSeconds) 15 -}}
{{- if lt (int .Values.terminationGracePeriodSeconds) (int $least) -}}
{{- fail (printf "terminationGracePeriodSeconds: got %d, wanted at least %d: drainTimeoutSeconds and 15 s for the rest of the stop" (int .Values.terminationGracePeriodSeconds) $least) -}}
{{- end -}}
metadata:
  labels:
    {{- include "lmhead.labels" . | nindent 4 }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: lmhead
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "lmhead.serviceAccountName" . }}
  # The service never talks to Kubernetes.
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ .Values.terminationGracePeriodSeconds }}
  {{- with .Values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .Values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 65532
    runAsGroup: 65532
    fsGroup: 65532
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      type: RuntimeDefault
  {{- with include "lmhead.tolerations" . }}
  tolerations:
    {{- . | nindent 4 }}
  {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - {{- include "lmhead.container" . | nindent 6 }}
  volumes:
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ .Values.sharedMemory.sizeLimit }}
    # CUDA's cache of compiled kernels and other small files of libraries: the root file system is read-only.
    - name: tmp
      emptyDir:
        sizeLimit: 1Gi
{{- end -}}
