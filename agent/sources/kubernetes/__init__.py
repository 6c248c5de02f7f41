"""The pods of a Kubernetes cluster as a source of engines.

api_server  the requests: a list, and a watch from a version on
pods        the engine of a pod
pod_watch   the engines now: lists once, then watches
"""
