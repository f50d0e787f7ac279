# The one image: every service of docker-compose.yaml but the broker and Postgres runs it. Python is what uv.lock says,
# byte-compiled; Java and the jars of include/ivy.xml are inside; nobody in it is root.

FROM eclipse-temurin:17.0.19_10-jre-noble AS java

FROM python:3.11.14-slim-bookworm AS build
# A copy between stages may change a file's date, and bytecode that is compared by date would then be compiled at each start.
ENV JAVA_HOME=/opt/java/openjdk \
    PATH=/opt/tidemark/.venv/bin:/opt/java/openjdk/bin:$PATH \
    UV_PYTHON_DOWNLOADS=never \
    UV_LINK_MODE=copy \
    PYC_INVALIDATION_MODE=UNCHECKED_HASH
COPY --from=java /opt/java/openjdk /opt/java/openjdk
WORKDIR /opt/tidemark
RUN pip install --no-cache-dir uv==0.13.9
COPY pyproject.toml uv.lock README.md ./
RUN uv sync --locked --no-dev --no-install-project
COPY . .
RUN uv sync --locked --no-dev \
    && python -m compileall -q --invalidation-mode unchecked-hash include dags plugins spark_apps
RUN TIDEMARK_HOME=/tmp/jars TIDEMARK_JARS_DIR=/opt/tidemark/jars tidemark jars \
    && rm -f /opt/tidemark/jars/lock /opt/tidemark/jars/spark.jsa*

FROM python:3.11.14-slim-bookworm
ENV JAVA_HOME=/opt/java/openjdk \
    PATH=/opt/tidemark/.venv/bin:/opt/java/openjdk/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    TIDEMARK_HOME=/var/lib/tidemark \
    TIDEMARK_JARS_DIR=/opt/tidemark/jars \
    AIRFLOW_HOME=/var/lib/tidemark/airflow \
    AIRFLOW__CORE__DAGS_FOLDER=/opt/tidemark/dags \
    AIRFLOW__CORE__PLUGINS_FOLDER=/opt/tidemark/plugins \
    GX_ANALYTICS_ENABLED=false
COPY --from=java /opt/java/openjdk /opt/java/openjdk
COPY --from=build /opt/tidemark /opt/tidemark
# An empty named volume takes the owner of the folder that it covers.
RUN useradd --uid 10001 --create-home tidemark && install -d -o tidemark -g tidemark /var/lib/tidemark
USER 10001
WORKDIR /opt/tidemark
CMD ["tidemark", "--help"]
