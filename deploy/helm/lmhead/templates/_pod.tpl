{{/*
A pod with the GPUs of one host: `lmhead serve`, or `lmhead follow` on the further hosts of a LeaderWorkerSet. Templates that differ take
(dict "root" $ "follower" BOOLEAN).
*/}}

{{/* The GPUs of this host, each a rank; the ranks of all hosts together hold each head. */}}
{{- define "lmhead.devices" -}}
{{- if gt (int .Values.gpu.count) 1 }}
- --devices={{ untilStep 0 (int .Values.gpu.count) 1 | join "," }}
{{- end }}
{{- end -}}

{{- define "lmhead.leadArgs" -}}
{{- if gt (int .Values.hosts) 1 }}
- --ranks={{ mul .Values.hosts (max 1 .Values.gpu.count) }}
- --local_ranks={{ max 1 .Values.gpu.count }}
- --group_listen=0.0.0.0:{{ .Values.ports.group }}
- --collective_host=$(POD_IP)
{{- end }}
{{- if gt (int .Values.headReplicas) 1 }}
- --replicas={{ .Values.headReplicas }}
{{- end }}
{{- end -}}

{{- define "lmhead.followArgs" -}}
- follow
# LWS sets it: the leader's stable name.
- --leader=$(LWS_LEADER_ADDRESS):{{ .Values.ports.group }}
- --local_ranks={{ max 1 .Values.gpu.count }}
- --backend={{ gt (int .Values.gpu.count) 0 | ternary "cuda" "cpu" }}
{{- include "lmhead.devices" . }}
{{- if .Values.security.tls.secretName }}
- --tls_ca_file=/etc/lmhead/tls/ca.crt
- --tls_cert_file=/etc/lmhead/tls/tls.crt
- --tls_key_file=/etc/lmhead/tls/tls.key
{{- end }}
{{- with .Values.flags.log_format }}
- --log_format={{ . }}
{{- end }}
{{- end -}}

{{- define "lmhead.serveArgs" -}}
- serve
- --listen=0.0.0.0:{{ .Values.ports.grpc }}
- --metrics_listen=0.0.0.0:{{ .Values.ports.metrics }}
- --backend={{ gt (int .Values.gpu.count) 0 | ternary "cuda" "cpu" }}
- --health_listen=0.0.0.0:{{ .Values.ports.health }}
{{- include "lmhead.devices" . }}
{{- include "lmhead.leadArgs" . }}
- --drain_timeout_seconds={{ .Values.drainTimeoutSeconds }}
{{- include "lmhead.securityArgs" . }}
{{- if .Values.checkpoints.enabled }}
- --checkpoint_dir=/checkpoints
- --checkpoint_keep={{ .Values.checkpoints.keep }}
- --restore={{ .Values.checkpoints.restore }}
{{- end }}
{{- range $name, $value := .Values.flags }}
{{- if not (kindIs "invalid" $value) }}
- {{ printf "--%s=%v" $name (kindIs "float64" $value | ternary (toJson $value) $value) | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "lmhead.securityArgs" -}}
{{- $security := .Values.security -}}
{{- if $security.insecure }}
- --insecure=true
{{- else }}
- --tls_cert_file=/etc/lmhead/tls/tls.crt
- --tls_key_file=/etc/lmhead/tls/tls.key
{{- if $security.tls.clientCertificates }}
- --tls_client_ca_file=/etc/lmhead/tls/ca.crt
{{- end }}
{{- if $security.policy }}
- --auth_policy_file=/etc/lmhead/policy/policy.json
{{- end }}
{{- if $security.tokensSecretName }}
- --auth_token_file=/etc/lmhead/tokens/tokens.json
{{- end }}
{{- end }}
{{- end -}}

{{/* Whole folders, never subPath: Kubernetes renews them by swapping a link, which a file that is mounted by itself would not see. */}}
{{- define "lmhead.securityMounts" -}}
{{- if .Values.security.tls.secretName }}
- name: tls
  mountPath: /etc/lmhead/tls
  readOnly: true
{{- if .Values.security.policy }}
- name: policy
  mountPath: /etc/lmhead/policy
  readOnly: true
{{- end }}
{{- if .Values.security.tokensSecretName }}
- name: tokens
  mountPath: /etc/lmhead/tokens
  readOnly: true
{{- end }}
{{- end }}
{{- end -}}

{{- define "lmhead.securityVolumes" -}}
{{- if .Values.security.tls.secretName }}
- name: tls
  secret:
    secretName: {{ .Values.security.tls.secretName }}
    # Readable by the group alone, which fsGroup makes the container's.
    defaultMode: 0440
{{- if .Values.security.policy }}
- name: policy
  configMap:
    name: {{ include "lmhead.fullname" . }}-policy
{{- end }}
{{- if .Values.security.tokensSecretName }}
- name: tokens
  secret:
    secretName: {{ .Values.security.tokensSecretName }}
    defaultMode: 0440
{{- end }}
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
{{- $follower := .follower -}}
{{- with .root -}}
name: lmhead
image: {{ include "lmhead.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- if $follower }}
# The first rank of this host follows from its place in the group, which only the pod knows.
command: [/bin/sh, -c, 'exec lmhead "$@" --rank=$((LWS_WORKER_INDEX * {{ max 1 .Values.gpu.count }}))', lmhead]
{{- end }}
args:
  {{- include ($follower | ternary "lmhead.followArgs" "lmhead.serveArgs") . | nindent 2 }}
env:
  # Waiting OpenMP threads sleep: they share the container's processors with gRPC.
  - name: OMP_WAIT_POLICY
    value: PASSIVE
  {{- if gt (int .Values.hosts) 1 }}
  - name: POD_IP
    valueFrom:
      fieldRef:
        fieldPath: status.podIP
  {{- end }}
  {{- with .Values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- if not $follower }}
ports:
  - name: grpc
    containerPort: {{ .Values.ports.grpc }}
  - name: metrics
    containerPort: {{ .Values.ports.metrics }}
  - name: health
    containerPort: {{ .Values.ports.health }}
  {{- if gt (int .Values.hosts) 1 }}
  - name: group
    containerPort: {{ .Values.ports.group }}
  {{- end }}
startupProbe:
  {{- include "lmhead.probe" (dict "port" .Values.ports.health "service" "readiness" "settings" .Values.probes.startup) | nindent 2 }}
readinessProbe:
  {{- include "lmhead.probe" (dict "port" .Values.ports.health "service" "readiness" "settings" .Values.probes.readiness) | nindent 2 }}
livenessProbe:
  {{- include "lmhead.probe" (dict "port" .Values.ports.health "service" "liveness" "settings" .Values.probes.liveness) | nindent 2 }}
{{- end }}
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
  {{- with include "lmhead.securityMounts" . }}
  {{- . | trim | nindent 2 }}
  {{- end }}
  {{- if and .Values.checkpoints.enabled (not $follower) }}
  - name: checkpoints
    mountPath: /checkpoints
  {{- end }}
{{- end -}}
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
{{- $container := include "lmhead.container" . -}}
{{- with .root -}}
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
    - {{ $container | nindent 6 | trim }}
  volumes:
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ .Values.sharedMemory.sizeLimit }}
    # CUDA's cache of compiled kernels and other small files of libraries: the root file system is read-only.
    - name: tmp
      emptyDir:
        sizeLimit: 1Gi
    {{- with include "lmhead.securityVolumes" . }}
    {{- . | trim | nindent 4 }}
    {{- end }}
{{- end -}}
{{- end -}}

{{- define "lmhead.volumeClaimTemplates" -}}
- metadata:
    name: checkpoints
    labels:
      {{- include "lmhead.selectorLabels" . | nindent 6 }}
  spec:
    accessModes:
      {{- toYaml .Values.checkpoints.accessModes | nindent 6 }}
    {{- with .Values.checkpoints.storageClassName }}
    storageClassName: {{ . }}
    {{- end }}
    resources:
      requests:
        storage: {{ .Values.checkpoints.size }}
{{- end -}}
