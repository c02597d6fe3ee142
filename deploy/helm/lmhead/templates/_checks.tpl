{{/*
Values that the schema takes one by one, but that make no sense together: each is refused with what was got and wanted, before a pod
with them restarts for ever.
*/}}

{{- define "lmhead.check" -}}
{{- include "lmhead.checkNames" . -}}
{{- include "lmhead.checkPorts" . -}}
{{- include "lmhead.checkRanks" . -}}
{{- include "lmhead.checkFlags" . -}}
{{- include "lmhead.checkSecurity" . -}}
{{- include "lmhead.checkMemory" . -}}
{{- include "lmhead.checkTimes" . -}}
{{- end -}}

{{/* Also the name of a service and a part of host names: a release may be called what these may not. */}}
{{- define "lmhead.checkNames" -}}
{{- $name := include "lmhead.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "fullnameOverride: the objects would be called %q, wanted lower-case letters, digits and dashes, a letter first" $name) -}}
{{- end -}}
{{- end -}}

{{- define "lmhead.checkPorts" -}}
{{- $seen := dict -}}
{{- range $name, $port := .Values.ports -}}
{{- $key := toString (int $port) -}}
{{- if hasKey $seen $key -}}
{{- fail (printf "ports: %s and %s are both %s, wanted one of its own for each" (get $seen $key) $name $key) -}}
{{- end -}}
{{- $_ := set $seen $key $name -}}
{{- end -}}
{{- end -}}

{{- define "lmhead.checkRanks" -}}
{{- $ranks := mul .Values.hosts (max 1 .Values.gpu.count) -}}
{{- if ne (mod $ranks .Values.headReplicas) 0 -}}
{{- fail (printf "headReplicas: got %d, wanted a divisor of hosts * gpu.count, %d" (int .Values.headReplicas) $ranks) -}}
{{- end -}}
{{- if and (eq (int .Values.hosts) 1) (or .Values.hostGroup.exclusiveTopology .Values.hostGroup.rollOut) -}}
{{- fail "hostGroup: it is of a LeaderWorkerSet, wanted hosts above 1; pods of a StatefulSet get a new version when you delete them" -}}
{{- end -}}
{{- end -}}

{{- define "lmhead.checkFlags" -}}
{{- $slots := default 16 .Values.flags.staging_slots -}}
{{- if gt (int (default 0 .Values.flags.max_streams)) (int $slots) -}}
{{- fail (printf "flags.max_streams: got %d, wanted at most flags.staging_slots, %d" (int .Values.flags.max_streams) (int $slots)) -}}
{{- end -}}
{{- end -}}

{{- define "lmhead.checkSecurity" -}}
{{- $security := .Values.security -}}
{{- if and $security.insecure $security.tls.secretName -}}
{{- fail "security: insecure and tls.secretName exclude each other" -}}
{{- end -}}
{{- if and (not $security.tls.secretName) (or $security.policy $security.tokensSecretName) -}}
{{- fail "security: policy and tokensSecretName need tls.secretName: roles and tokens travel over TLS only" -}}
{{- end -}}
{{- if not (or $security.insecure $security.tls.secretName) -}}
{{- fail "security: set tls.secretName, or insecure: true where the network keeps strangers out" -}}
{{- end -}}
{{- if and $security.policy (not $security.tls.clientCertificates) (not $security.tokensSecretName) -}}
{{- fail "security.policy needs identities to judge: set tls.clientCertificates or tokensSecretName" -}}
{{- end -}}
{{- if and (gt (int .Values.hosts) 1) $security.tokensSecretName (not $security.tls.clientCertificates) -}}
{{- fail "hosts: the pods of further hosts show the certificate of tls.secretName and no token: set tls.clientCertificates" -}}
{{- end -}}
{{- if $security.policy -}}
{{- include "lmhead.checkPolicy" . -}}
{{- end -}}
{{- end -}}

{{/* Who is listed has to be able to come, and only once. */}}
{{- define "lmhead.checkPolicy" -}}
{{- $security := .Values.security -}}
{{- $seen := dict -}}
{{- $shards := false -}}
{{- range default list $security.policy.identities -}}
{{- $kind := hasKey . "name" | ternary "name" "token" -}}
{{- $identity := printf "%s %s" $kind (get . $kind) -}}
{{- if hasKey $seen $identity -}}
{{- fail (printf "security.policy: %s is listed twice" $identity) -}}
{{- end -}}
{{- $_ := set $seen $identity true -}}
{{- if and .token (not $security.tokensSecretName) -}}
{{- fail (printf "security.policy: %s is of a token, wanted tokensSecretName, which names it" $identity) -}}
{{- end -}}
{{- if and .name (not $security.tls.clientCertificates) -}}
{{- fail (printf "security.policy: %s is of a certificate, wanted tls.clientCertificates" $identity) -}}
{{- end -}}
{{- if and .name (has "shard" .roles) -}}{{- $shards = true -}}{{- end -}}
{{- end -}}
{{- if and (gt (int .Values.hosts) 1) (not $shards) -}}
{{- fail "security.policy: with hosts above 1 a name of the certificate of tls.secretName needs role shard" -}}
{{- end -}}
{{- end -}}

{{- define "lmhead.checkMemory" -}}
{{- $limit := include "lmhead.bytes" .Values.resources.limits.memory | float64 -}}
{{- if gt (include "lmhead.bytes" .Values.sharedMemory.sizeLimit | float64) $limit -}}
{{- fail (printf "sharedMemory.sizeLimit: got %s, wanted at most resources.limits.memory, to which it counts" .Values.sharedMemory.sizeLimit) -}}
{{- end -}}
{{- $requests := default dict .Values.resources.requests -}}
{{- if and $requests.memory (gt (include "lmhead.bytes" $requests.memory | float64) $limit) -}}
{{- fail "resources.requests.memory: it is above resources.limits.memory" -}}
{{- end -}}
{{- end -}}

{{/* A quantity such as 1.5Gi as a number. */}}
{{- define "lmhead.bytes" -}}
{{- $text := kindIs "string" . | ternary (toString .) (printf "%.0f" (float64 .)) -}}
{{- $factors := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976 -}}
{{- $number := regexFind "^[0-9.]+" $text -}}
{{- printf "%.0f" (mulf (float64 $number) (float64 (get $factors (trimPrefix $number $text)))) -}}
{{- end -}}

{{- define "lmhead.checkTimes" -}}
{{- $least := add (int .Values.drainTimeoutSeconds) 15 -}}
{{- if lt (int .Values.terminationGracePeriodSeconds) (int $least) -}}
{{- fail (printf "terminationGracePeriodSeconds: got %d, wanted at least %d: drainTimeoutSeconds and 15 s for the rest of the stop" (int .Values.terminationGracePeriodSeconds) $least) -}}
{{- end -}}
{{- $monitor := .Values.serviceMonitor -}}
{{- if gt (include "lmhead.milliseconds" $monitor.scrapeTimeout | int64) (include "lmhead.milliseconds" $monitor.interval | int64) -}}
{{- fail (printf "serviceMonitor.scrapeTimeout: got %s, wanted at most serviceMonitor.interval, %s" $monitor.scrapeTimeout $monitor.interval) -}}
{{- end -}}
{{- end -}}

{{/* A duration such as 1m30s as a number. */}}
{{- define "lmhead.milliseconds" -}}
{{- $factors := dict "h" 3600000 "m" 60000 "s" 1000 "ms" 1 -}}
{{- $sum := 0 -}}
{{- range regexFindAll "[0-9]+[hms]+" . -1 -}}
{{- $number := regexFind "^[0-9]+" . -}}
{{- $sum = add $sum (mul (int64 $number) (get $factors (trimPrefix $number .))) -}}
{{- end -}}
{{- $sum -}}
{{- end -}}
