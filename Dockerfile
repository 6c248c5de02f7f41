# goodput-agent, from this repository and its lock file alone.
ARG BASE=python:3.11.16-slim-trixie

FROM ${BASE} AS build
ARG WHEELS=/wheels
ARG VENV=/opt/goodput-agent
WORKDIR /build
COPY requirements-image.lock ./
RUN python -m pip download --no-deps --require-hashes --only-binary :all: \
      --requirement requirements-image.lock --dest "$WHEELS"
COPY pyproject.toml README.md LICENSE ./
COPY agent ./agent
COPY migrations ./migrations
COPY docs ./docs
RUN python -m pip wheel --no-deps --wheel-dir "$WHEELS" .
# Installs only packages that were checked above, and of those only the agent's dependencies.
RUN python -m venv --without-pip "$VENV" \
 && python -m pip --python "$VENV/bin/python" install --no-index --find-links "$WHEELS" "goodput-agent[clickhouse,postgres]"

FROM ${BASE}
ARG VENV=/opt/goodput-agent
COPY --from=build ${VENV} ${VENV}
COPY deploy/image/settings.yml /etc/goodput-agent/settings.yml
RUN install --directory --owner 10001 --group 10001 /data
ENV PATH=${VENV}/bin:${PATH} \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# The check uses the port of the environment; a port set in a file, or TLS, needs another health check.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
  CMD ["python", "-c", "import http.client, os; connection = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('GOODPUT_LISTEN__PORT', '9470')), timeout=4); connection.request('GET', '/healthz'); raise SystemExit(connection.getresponse().status != 200)"]
# By number, so that Kubernetes can check that it is not root.
USER 10001:10001
VOLUME /data
# The default database URL is relative, so its file lies in the volume.
WORKDIR /data
EXPOSE 9470 4317 4318
ENTRYPOINT ["goodput-agent"]
CMD ["run", "--config", "/etc/goodput-agent/settings.yml"]
