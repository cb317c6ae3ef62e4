{{/* Names and labels, what a drafter has, and how settings become environment variables; nothing else. */}}

{{/* Short, since a StatefulSet's name has to leave room for a hash in a label of 63 characters. */}}
{{- define "coppice.fullname" -}}
{{ default .Release.Name .Values.fullnameOverride | trunc 28 | trimSuffix "-" }}
{{- end }}

{{/* What selects a component's pods: (list . "orchestrator"). Never changes in a release's life. */}}
{{- define "coppice.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ $root.Chart.Name }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
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

{{/* What a drafter has, as JSON: (list . entry-of-drafters). Its own settings go over the defaults', key by key; but
     what belongs together it has whole, or an entry could not do without a default volume, node or GPU. */}}
{{- define "coppice.drafter" -}}
{{- $root := index . 0 -}}
{{- $entry := index . 1 -}}
{{- $drafter := mergeOverwrite (deepCopy $root.Values.drafterDefaults) (deepCopy $entry) -}}
{{- range tuple "weights" "nodeSelector" "affinity" "resources" -}}
{{- if hasKey $entry . -}}
{{- $_ := set $drafter . (get $entry .) -}}
{{- end -}}
{{- end -}}
{{- toJson $drafter -}}
{{- end }}

{{/* `config` as environment variables. JSON writes large numbers out; plain printing would have 1e+06. */}}
{{- define "coppice.env" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
{{- end }}
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
