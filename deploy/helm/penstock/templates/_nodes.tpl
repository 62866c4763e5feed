{{/*
The environment of a node. Given: root; name of its StatefulSet; roles.
*/}}
{{- define "penstock.environment" -}}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: POD_NAMESPACE
  valueFrom:
    fieldRef:
      fieldPath: metadata.namespace
# The ordinal.
- name: PENSTOCK_NODE_ID
  valueFrom:
    fieldRef:
      fieldPath: metadata.labels['apps.kubernetes.io/pod-index']
# Kubernetes 1.35 and later copies it from the host's labels; empty elsewhere.
- name: PENSTOCK_NODE_RACK
  valueFrom:
    fieldRef:
      fieldPath: metadata.labels['topology.kubernetes.io/zone']
- name: PENSTOCK_NODE_ROLES
  value: {{ .roles }}
- name: PENSTOCK_CONTROLLER_QUORUM_VOTERS
  value: {{ include "penstock.voters" .root }}
{{- if contains "controller" .roles }}
- name: PENSTOCK_CONTROLLER_ADVERTISED
  value: $(POD_NAME).{{ .root.Release.Name }}-nodes.$(POD_NAMESPACE).svc:10092
{{- end }}
- name: PENSTOCK_BROKER_ADVERTISED
  value: $(POD_NAME).{{ .root.Release.Name }}-nodes.$(POD_NAMESPACE).svc:9092
{{- if and .root.Values.external.domain (contains "broker" .roles) }}
- name: PENSTOCK_EXTERNAL_LISTEN
  value: 0.0.0.0:9095
- name: PENSTOCK_EXTERNAL_ADVERTISED
  value: $(POD_NAME).{{ .root.Values.external.domain }}:9092
{{- end }}
- name: PENSTOCK_BOOTSTRAP
  value: $(PENSTOCK_BROKER_ADVERTISED)
- name: PENSTOCK_CLUSTER_ID
  valueFrom:
    secretKeyRef:
      name: {{ .root.Release.Name }}-cluster
      key: cluster-id
{{- if .root.Values.tls.enabled }}
- {name: PENSTOCK_TLS_CA, value: /etc/penstock-tls/$(POD_NAME)/ca.crt}
- {name: PENSTOCK_TLS_CERTIFICATE, value: /etc/penstock-tls/$(POD_NAME)/tls.crt}
# What commands in the pod call the same file.
- {name: PENSTOCK_TLS_CERT, value: /etc/penstock-tls/$(POD_NAME)/tls.crt}
- {name: PENSTOCK_TLS_KEY, value: /etc/penstock-tls/$(POD_NAME)/tls.key}
{{- else }}
- {name: PENSTOCK_CONTROLLER_INSECURE_ALLOW, value: "true"}
{{- end }}
{{- end }}

{{- define "penstock.host-term" -}}
topologyKey: kubernetes.io/hostname
labelSelector:
  matchLabels:
    {{- include "penstock.selector" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/*
A StatefulSet. Given: root, name, component, roles, replicas, first (ordinal), grace (seconds),
storage, resources.
*/}}
{{- define "penstock.statefulset" -}}
{{- $broker := contains "broker" .roles -}}
{{- $release := .root.Release.Name -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ .name }}
  labels:
    {{- include "penstock.selector" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
spec:
  serviceName: {{ $release }}-nodes
  replicas: {{ .replicas }}
  {{- if .first }}
  ordinals:
    start: {{ .first }}
  {{- end }}
  # The first start needs all controllers at once.
  podManagementPolicy: Parallel
  minReadySeconds: 10
  updateStrategy:
    type: RollingUpdate
  persistentVolumeClaimRetentionPolicy:
    whenDeleted: Retain
    whenScaled: Retain
  selector:
    matchLabels:
      {{- include "penstock.selector" .root | nindent 6 }}
      app.kubernetes.io/component: {{ .component }}
  template:
    metadata:
      labels:
        {{- include "penstock.selector" .root | nindent 8 }}
        app.kubernetes.io/component: {{ .component }}
      annotations:
        # Other settings restart the nodes, one by one.
        checksum/settings: {{ include "penstock.node-toml" .root | sha256sum }}
    spec:
      serviceAccountName: {{ $release }}
      automountServiceAccountToken: false
      # Variables that Kubernetes makes of services would look like settings.
      enableServiceLinks: false
      terminationGracePeriodSeconds: {{ .grace }}
      securityContext:
        {{- include "penstock.pod-security" . | nindent 8 }}
        fsGroupChangePolicy: OnRootMismatch
      affinity:
        podAntiAffinity:
          {{- if eq .root.Values.antiAffinity "hard" }}
          requiredDuringSchedulingIgnoredDuringExecution:
            - {{- include "penstock.host-term" . | nindent 14 }}
          {{- else }}
          preferredDuringSchedulingIgnoredDuringExecution:
            - weight: 100
              podAffinityTerm:
                {{- include "penstock.host-term" . | nindent 16 }}
          {{- end }}
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: topology.kubernetes.io/zone
          whenUnsatisfiable: {{ .root.Values.zoneSpread }}
          labelSelector:
            matchLabels:
              {{- include "penstock.selector" .root | nindent 14 }}
              app.kubernetes.io/component: {{ .component }}
      initContainers:
        - name: adopt
          image: {{ include "penstock.image" .root }}
          imagePullPolicy: IfNotPresent
          args:
            - adopt
            - --config=/etc/penstock/node.toml
            - --records=kubernetes
            - --name={{ $release }}
          env:
            {{- include "penstock.environment" . | nindent 12 }}
          resources:
            requests: {cpu: 100m, memory: 128Mi}
            limits: {cpu: "1", memory: 256Mi}
          securityContext:
            {{- include "penstock.container-security" . | nindent 12 }}
          volumeMounts:
            - {name: data, mountPath: /var/lib/penstock}
            - {name: settings, mountPath: /etc/penstock, readOnly: true}
            - {name: account, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
      containers:
        - name: penstock
          image: {{ include "penstock.image" .root }}
          imagePullPolicy: IfNotPresent
          args:
            - node
            - --config=/etc/penstock/node.toml
          env:
            {{- include "penstock.environment" . | nindent 12 }}
          ports:
            {{- if $broker }}
            - {name: broker, containerPort: 9092}
            - {name: frames, containerPort: 9093}
            {{- end }}
            - {name: controller, containerPort: 10092}
            - {name: http, containerPort: 9094}
            {{- if and .root.Values.external.domain $broker }}
            - {name: external, containerPort: 9095}
            {{- end }}
          # An hour for a recovery.
          startupProbe:
            httpGet: {path: /startupz, port: http}
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: 720
          # In the quorum, unfenced, caught up with metadata; never that all replicas are in sync.
          readinessProbe:
            httpGet: {path: /readyz, port: http}
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: 2
          # The event loop turns, and nothing else: a restart helps against nothing else.
          livenessProbe:
            httpGet: {path: /livez, port: http}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 6
          lifecycle:
            preStop:
              exec:
                command: [python, /opt/penstock/etc/prestop.py, {{ div .grace 2 | quote }}]
          resources:
            {{- toYaml .resources | nindent 12 }}
          securityContext:
            {{- include "penstock.container-security" . | nindent 12 }}
          volumeMounts:
            - {name: data, mountPath: /var/lib/penstock}
            - {name: settings, mountPath: /etc/penstock, readOnly: true}
            {{- if .root.Values.tls.enabled }}
            - {name: tls, mountPath: /etc/penstock-tls, readOnly: true}
            {{- end }}
      volumes:
        - name: settings
          configMap:
            name: {{ $release }}-settings
        - name: account
          projected:
            sources:
              - serviceAccountToken:
                  path: token
                  expirationSeconds: 3600
              - configMap:
                  name: kube-root-ca.crt
                  items:
                    - {key: ca.crt, path: ca.crt}
              - downwardAPI:
                  items:
                    - path: namespace
                      fieldRef:
                        fieldPath: metadata.namespace
        {{- if .root.Values.tls.enabled }}
        # Those of all nodes, so that renewed ones come without a restart.
        - name: tls
          projected:
            defaultMode: 288  # 0440
            sources:
              {{- $name := .name }}
              {{- range $id := untilStep (int .first) (int (add .first .replicas)) 1 }}
              - secret:
                  name: {{ $name }}-{{ $id }}-tls
                  items:
                    - {key: ca.crt, path: {{ $name }}-{{ $id }}/ca.crt}
                    - {key: tls.crt, path: {{ $name }}-{{ $id }}/tls.crt}
                    - {key: tls.key, path: {{ $name }}-{{ $id }}/tls.key}
              {{- end }}
        {{- end }}
  volumeClaimTemplates:
    - metadata:
        name: data
      spec:
        accessModes: [ReadWriteOnce]
        {{- with .root.Values.storageClassName }}
        storageClassName: {{ . }}
        {{- end }}
        resources:
          requests:
            storage: {{ .storage }}
{{- end }}

{{/* A node's certificate. Given: root, pod, id, component, names. */}}
{{- define "penstock.certificate" -}}
apiVersion: cert-manager.io/v1
kind: Certificate
metadata:
  name: {{ .pod }}
  labels:
    {{- include "penstock.selector" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
spec:
  secretName: {{ .pod }}-tls
  duration: 2160h
  renewBefore: 720h
  privateKey: {algorithm: ECDSA, size: 256, rotationPolicy: Always}
  usages: [digital signature, server auth, client auth]
  dnsNames:
    - node-{{ .id }}.{{ .root.Values.clusterId }}.penstock
    - {{ .pod }}.{{ .root.Release.Name }}-nodes.{{ .root.Release.Namespace }}.svc
    {{- range .names }}
    - {{ . }}
    {{- end }}
  issuerRef: {name: {{ .root.Release.Name }}, kind: Issuer}
{{- end }}

{{/* Given: root, name, component, note. */}}
{{- define "penstock.disruption" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  labels:
    {{- include "penstock.selector" .root | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "penstock.selector" .root | nindent 6 }}
      app.kubernetes.io/component: {{ .component }}
{{- end }}
