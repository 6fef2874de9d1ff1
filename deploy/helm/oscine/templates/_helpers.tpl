{{- define "oscine.selector" -}}
app.kubernetes.io/name: oscine
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "oscine.labels" -}}
{{ include "oscine.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}
{{- define "oscine.target" -}}
job="{{ .Release.Name }}", namespace="{{ .Release.Namespace }}"
{{- end }}
