{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "penstock.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* The name of the StatefulSet of controllers, and the ids of its nodes. */}}
{{- define "penstock.controllers" -}}
{{ .Release.Name }}{{ if .Values.controllers.dedicated }}-controller{{ end }}
{{- end }}

{{- define "penstock.controller-ids" -}}
{{- if .Values.controllers.dedicated -}}
{{ untilStep 100 (int (add 100 .Values.controllers.replicas)) 1 | join " " }}
{{- else -}}
{{ until (int .Values.replicas) | join " " }}
{{- end -}}
{{- end }}

{{- define "penstock.voters" -}}
{{- $voters := list -}}
{{- range splitList " " (include "penstock.controller-ids" .) -}}
{{- $voters = append $voters (printf "%s@%s-%s.%s-nodes.$(POD_NAMESPACE).svc:10092" . (include "penstock.controllers" $) . $.Release.Name) -}}
{{- end -}}
{{ join "," $voters }}
{{- end }}

{{/*
What stands in the environment of each node, and would win over the file in silence. Given: the key.
*/}}
{{- define "penstock.refuse-setting" -}}
{{- $environment := list "node.id" "node.rack" "node.roles" "controller.quorum.voters" "controller.advertised" "controller.insecure.allow" "broker.advertised" "external.listen" "external.advertised" "cluster.id" -}}
{{- if or (has . $environment) (hasPrefix "tls." .) -}}
{{- fail (printf "settings must not have %s: the chart sets it for each node; next: take it away, and see values.yaml for what decides it" .) -}}
{{- end -}}
{{- end }}

{{- define "penstock.node-toml" -}}
# The settings that all nodes share; what is a node's own is in its environment.
{{- $settings := .Values.settings -}}
{{- $ours := list (list "data.dir" "/var/lib/penstock/data") (list "broker.listen" "0.0.0.0:9092") (list "replication.frames.listen" "0.0.0.0:9093") (list "controller.listen" "0.0.0.0:10092") (list "metrics.listen" "0.0.0.0:9094") (list "log.format" "json") -}}
{{- $names := list -}}
{{- range $ours -}}
{{- $names = append $names (first .) -}}
{{- $value := last . -}}
{{- if hasKey $settings (first .) }}{{ $value = get $settings (first .) }}{{ end }}
{{ first . }} = {{ toJson $value }}
{{- end }}
{{- range $key, $value := $settings }}
{{- include "penstock.refuse-setting" $key -}}
{{- if not (has $key $names) }}
{{ $key }} = {{ if kindIs "float64" $value }}{{ int64 $value }}{{ else }}{{ toJson $value }}{{ end }}
{{- end }}
{{- end }}
{{ end }}

{{/* What nobody but a node of ours should be able to do. */}}
{{- define "penstock.pod-security" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "penstock.container-security" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
readOnlyRootFilesystem: true
{{- end }}
