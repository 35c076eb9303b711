{{- define "dips.context" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "dips.locked" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "dips.keep" -}}
cluster-autoscaler.kubernetes.io/safe-to-evict: "false"
karpenter.sh/do-not-disrupt: "true"
{{- end }}

{{- /* The volumes of a daemon: (list . NAMES-SECRET CERTIFICATE) */}}
{{- define "dips.volumes" -}}
{{- $root := index . 0 -}}
- name: run
  configMap: {name: dips-run}
{{- if $root.Values.issuer }}
- name: tls                     # links: the certificate of csi-driver, and the revocations, both live
  emptyDir: {sizeLimit: 1Mi}
- name: certificate             # of this pod alone, renewed under it; its key never leaves the node
  csi:
    driver: csi.cert-manager.io
    readOnly: true
    volumeAttributes:
      csi.cert-manager.io/issuer-kind: ClusterIssuer
      csi.cert-manager.io/issuer-name: {{ $root.Values.issuer }}
      csi.cert-manager.io/dns-names: {{ index . 2 }}.{{ $root.Values.run }}.dips
      csi.cert-manager.io/key-algorithm: ECDSA
      csi.cert-manager.io/key-usages: digital signature,server auth,client auth
      csi.cert-manager.io/duration: 720h
      csi.cert-manager.io/fs-group: "10001"
- name: revocations
  configMap: {name: dips-crl}
{{- else }}
- name: tls
  secret: {secretName: {{ index . 1 }}, defaultMode: 0440}
{{- end }}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
{{- end }}

{{- define "dips.links" -}}
{{- if .Values.issuer }}
initContainers:
  - name: links                 # crl.pem is looked for beside the certificate, where csi-driver puts no file of ours
    image: {{ .Values.images.daemons }}
    command: [sh, -c, 'ln -sf /etc/dips-certificate/tls.crt /etc/dips-certificate/tls.key /etc/dips-certificate/ca.crt /etc/dips-revocations/crl.pem /etc/dips-tls/']
    resources:
      requests: {cpu: 10m, memory: 16Mi}
      limits: {memory: 16Mi}
    securityContext: {{- include "dips.locked" . | nindent 6 }}
    volumeMounts:
      - {name: tls, mountPath: /etc/dips-tls}
      - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end }}

{{- define "dips.mounts" -}}
- {name: run, mountPath: /etc/dips, readOnly: true}
- {name: tls, mountPath: /etc/dips-tls, readOnly: true}
{{- if .Values.issuer }}
- {name: certificate, mountPath: /etc/dips-certificate, readOnly: true}
- {name: revocations, mountPath: /etc/dips-revocations, readOnly: true}
{{- end }}
- {name: state, mountPath: /var/lib/dips}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "dips.account" -}}
{{- if .Values.mirror.url }}
serviceAccountName: dips-servers
{{- end }}
automountServiceAccountToken: false
{{- end }}

{{- define "dips.claim" -}}
- metadata: {name: state}
  spec:
    accessModes: [ReadWriteOncePod]
    {{- with .storageClass }}
    storageClassName: {{ . }}
    {{- end }}
    resources:
      requests: {storage: {{ .storage }}}
{{- end }}
