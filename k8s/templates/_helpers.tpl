{{/* Names and labels, what a drafter has, and how settings become environment variables; nothing else. */}}

{{/* A template for each of `models`, or for the one that has no name: (list . "coppice.file.verifier"). It sees the values
     as if they were of that model alone. */}}
{{- define "coppice.each" -}}
{{- $root := index . 0 -}}
{{- $template := index . 1 -}}
{{- $names := list -}}
{{- range $model := default (list dict) $root.Values.models }}
{{- if has (get $model "name") $names }}
{{- fail (printf "models has two entries named %s" $model.name) }}
{{- end }}
{{- $names = append $names (get $model "name") }}
{{- $values := deepCopy $root.Values }}
{{- range $key, $own := $model }}
{{- if and (kindIs "map" $own) (hasKey $values $key) }}
{{- $_ := set $values $key (include "coppice.over" (list (get $values $key) $own) | fromJson) }}
{{- else }}
{{- $_ := set $values $key $own }}
{{- end }}
{{- end }}
---
{{ include $template (dict "Values" $values "Chart" $root.Chart "Release" $root.Release "Files" $root.Files) }}
{{- end }}
{{- end }}

{{/* Settings with others over them, as JSON: (list of-all own). Key by key; but what belongs together an entry has whole, or
     it could not do without a default volume, node or GPU. */}}
{{- define "coppice.over" -}}
{{- $own := index . 1 -}}
{{- $merged := mergeOverwrite (deepCopy (index . 0)) (deepCopy $own) -}}
{{- range tuple "weights" "nodeSelector" "affinity" "resources" -}}
{{- if hasKey $own . -}}
{{- $_ := set $merged . (get $own .) -}}
{{- end -}}
{{- end -}}
{{- toJson $merged -}}
{{- end }}

{{/* Short, since a StatefulSet's name has to leave room for a hash in a label of 63 characters; refused where it is longer,
     since two names that are cut may be one. `NAME-drafter-` begins the names of NAME's drafters, and no other release's. */}}
{{- define "coppice.fullname" -}}
{{- $release := default .Release.Name .Values.fullnameOverride -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $release) -}}
{{- fail (printf "a release, or fullnameOverride, begins with a letter, ends with a letter or a digit, and has these and '-' only: not %q" $release) -}}
{{- end -}}
{{- $name := .Values.name | empty | ternary $release (printf "%s-%s" $release .Values.name) -}}
{{- if gt (len $name) 28 -}}
{{- fail (printf "%q has %d characters, and names have at most 28: set fullnameOverride" $name (len $name)) -}}
{{- end -}}
{{- if regexMatch "-drafter(-|$)" $name -}}
{{- fail (printf "%q might be the name of a release's drafter: set fullnameOverride" $name) -}}
{{- end -}}
{{ $name }}
{{- end }}

{{/* What selects all pods of a model. Never changes in a release's life. */}}
{{- define "coppice.ours" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- with .Values.name }}
coppice/model: {{ . | quote }}
{{- end }}
{{- end }}

{{/* What selects a component's pods: (list . "orchestrator"). Never changes in a release's life. */}}
{{- define "coppice.selector" -}}
{{ include "coppice.ours" (index . 0) }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* How many replicas of a back end orchestrators know by name: all that there may be without starting them again. */}}
{{- define "coppice.mostReplicas" -}}
{{ max (int .replicas) (int .autoscaling.maxReplicas) }}
{{- end }}

{{/* Refuses an autoscaler that Kubernetes would refuse: (list "verifier" its-autoscaling). */}}
{{- define "coppice.checkScaling" -}}
{{- $scaling := index . 1 -}}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) -}}
{{- fail (printf "%s.autoscaling has minReplicas %d above maxReplicas %d" (index . 0) (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
{{- end -}}
{{- end }}

{{/* Refuses an address from outside that two models have, or a model's two routes, of which one would never be asked. */}}
{{- define "coppice.checkAddresses" -}}
{{- $root := . -}}
{{- $owners := dict -}}
{{- range $model := default (list dict) .Values.models }}
{{- $ingress := include "coppice.over" (list $root.Values.ingress (default dict $model.ingress)) | fromJson -}}
{{- $routes := include "coppice.over" (list $root.Values.routes (default dict $model.routes)) | fromJson -}}
{{- $addresses := list -}}
{{- if $ingress.enabled }}
{{- range $host := $ingress.hosts }}
{{- range $path := $ingress.paths }}
{{- $addresses = append $addresses (list "ingress" (printf "%s%s" $host (trimSuffix "/" $path))) -}}
{{- end }}
{{- end }}
{{- end }}
{{- range $kind := tuple "http" "grpc" }}
{{- $route := get $routes $kind -}}
{{- if $route.enabled }}
{{- range $host := default (list "all hosts") $route.hostnames }}
{{- range $parent := $route.parentRefs }}
{{- $addresses = append $addresses (list (printf "routes.%s" $kind) (printf "%s at %s" $host (toJson $parent))) -}}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- range $address := $addresses }}
{{- $who := printf "%s%s" (index $address 0) ($model.name | empty | ternary "" (printf " of model %s" $model.name)) -}}
{{- $key := printf "%s %s" (index $address 0 | hasPrefix "routes" | ternary "route" "ingress") (index $address 1) -}}
{{- if hasKey $owners $key }}
{{- fail (printf "%s and %s both have %s: give each hosts of its own" (get $owners $key) $who (index $address 1)) }}
{{- end }}
{{- $_ := set $owners $key $who -}}
{{- end }}
{{- end }}
{{- end }}

{{/* Egress to what resolves names; nothing where nobody does, since an empty list would be everybody. */}}
{{- define "coppice.dnsEgress" -}}
{{- with .Values.networkPolicy.dns -}}
- to: {{- toYaml . | nindent 4 }}
  ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
{{- end }}
{{- end }}

{{/* Refuses settings that would have no effect without others. */}}
{{- define "coppice.checkTogether" -}}
{{- if and .Values.tls.public.clientCertificates (not .Values.tls.enabled) -}}
{{- fail "tls.public.clientCertificates needs tls.enabled" -}}
{{- end -}}
{{- if and .Values.metrics.serviceMonitor.enabled (not .Values.metrics.enabled) -}}
{{- fail "metrics.serviceMonitor needs metrics.enabled" -}}
{{- end -}}
{{- if and .Values.metrics.prometheusRule.enabled (not .Values.metrics.enabled) -}}
{{- fail "metrics.prometheusRule needs metrics.enabled" -}}
{{- end -}}
{{- if and .Values.tracing.config (not .Values.tracing.endpoint) -}}
{{- fail "tracing.config needs tracing.endpoint" -}}
{{- end -}}
{{- $tls := .Values.tls -}}
{{- if and $tls.enabled (ge (trimSuffix "h" $tls.renewBefore | int) (trimSuffix "h" $tls.duration | int)) -}}
{{- fail (printf "tls.renewBefore %s must be less than tls.duration %s" $tls.renewBefore $tls.duration) -}}
{{- end -}}
{{- end }}

{{/* The selector, and what else is good to know: (list . "orchestrator"). */}}
{{- define "coppice.labels" -}}
{{- $root := index . 0 -}}
{{ include "coppice.selector" . }}
app.kubernetes.io/part-of: coppice
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
{{- end }}

{{/* The image of (list . .Values.orchestrator.image); a digest goes before a tag. */}}
{{- define "coppice.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default $root.Chart.AppVersion $image.tag }}
{{- end }}
{{- end }}

{{/* Name of the target's state: another one wherever verifiers may serve something else, or are given another name. */}}
{{- define "coppice.targetRevision" -}}
{{- $own := pick .Values.verifier "targetRevision" "config" "weights" "initContainers" "extraEnv" "envFrom" "extraVolumes" "extraVolumeMounts" -}}
{{ list (include "coppice.image" (list . .Values.verifier.image)) $own | toJson | sha256sum | trunc 12 }}
{{- end }}

{{/* What a drafter has, as JSON: (list . entry-of-drafters). */}}
{{- define "coppice.drafter" -}}
{{- include "coppice.over" (list (index . 0).Values.drafterDefaults (index . 1)) -}}
{{- end }}

{{/* `config` as environment variables. JSON writes large numbers out; plain printing would have 1e+06. */}}
{{- define "coppice.env" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
{{- end }}
{{- end }}

{{/* Environment variables, each of them once, or Kubernetes refuses them or takes the last: (list "verifier" text). */}}
{{- define "coppice.uniqueEnv" -}}
{{- $what := index . 0 -}}
{{- $names := list -}}
{{- range index . 1 | fromYamlArray -}}
{{- if has .name $names -}}
{{- fail (printf "%s has the environment variable %s twice: it is set by the chart, by config or by tracing.config" $what .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{ index . 1 | trim }}
{{- end }}

{{/* Names of the Secrets that TLS takes: of the public API, and of (list . name-of-the-workload) among ourselves. */}}
{{- define "coppice.publicSecret" -}}
{{ default (printf "%s-public-tls" (include "coppice.fullname" .)) .Values.tls.public.existingSecret }}
{{- end }}
{{- define "coppice.internalSecret" -}}
{{- $root := index . 0 -}}
{{ default (printf "%s-tls" (index . 1)) $root.Values.tls.internal.existingSecret }}
{{- end }}

{{/* Environment of a back end with TLS. */}}
{{- define "coppice.internalTlsEnv" -}}
- {name: TLS_CERT, value: /tls/internal/tls.crt}
- {name: TLS_KEY, value: /tls/internal/tls.key}
- {name: TLS_CLIENT_CA, value: /tls/internal/ca.crt}
- {name: HEALTH_PORT, value: "9101"}
{{- end }}

{{/* The port that probes ask: (list . port-of-the-service). Kubernetes' own probes speak no TLS. */}}
{{- define "coppice.probePort" -}}
{{- $root := index . 0 -}}
{{ $root.Values.tls.enabled | ternary 9101 (index . 1) }}
{{- end }}
