"""Studies on Kubernetes: manifests from the files under k8s/, and the API calls that submit, watch and stop them."""
