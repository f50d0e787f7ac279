import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.time.OffsetDateTime;
import java.util.Properties;
import net.agkn.hll.HLL;
import org.apache.kafka.common.serialization.Deserializer;
import org.apache.kafka.common.serialization.Serde;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.common.serialization.Serializer;
import org.apache.kafka.common.utils.Bytes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.TimeWindows;
import org.apache.kafka.streams.state.WindowStore;

/** The peer: Kafka Streams, the way its documentation counts over a hopping window. What it finds it writes nowhere. */
public class PlainStreams {
    record View(String page, String visitor, long at) {}

    record Counted(long pv, HLL visitors) {}

    static final ObjectMapper JSON = new ObjectMapper();

    public static void main(String[] args) {
        Properties said = new Properties();
        said.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, args[0]);
        said.put(StreamsConfig.APPLICATION_ID_CONFIG, args[2]);
        said.put(StreamsConfig.STATE_DIR_CONFIG, args[3]);
        said.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG, 2);
        said.put(StreamsConfig.COMMIT_INTERVAL_MS_CONFIG, 5000);
        said.put(StreamsConfig.STATESTORE_CACHE_MAX_BYTES_CONFIG, 256L << 20);
        said.put(StreamsConfig.consumerPrefix("auto.offset.reset"), "earliest");
        StreamsBuilder builder = new StreamsBuilder();
        builder.stream(
                        args[1],
                        Consumed.with(Serdes.ByteArray(), views())
                                .withTimestampExtractor((r, before) -> r.value() == null ? before : ((View) r.value()).at()))
                .filter((key, view) -> view != null)
                .groupBy((key, view) -> view.page(), Grouped.with(Serdes.String(), views()))
                .windowedBy(
                        TimeWindows.ofSizeAndGrace(Duration.ofHours(1), Duration.ofMinutes(10)).advanceBy(Duration.ofSeconds(5)))
                .aggregate(
                        () -> new Counted(0, new HLL(10, 5)),
                        (page, view, so) -> {
                            so.visitors().addRaw(mixed(view.visitor()));
                            return new Counted(so.pv() + 1, so.visitors());
                        },
                        Materialized.<String, Counted, WindowStore<Bytes, byte[]>>as("hours")
                                .withKeySerde(Serdes.String())
                                .withValueSerde(counts()))
                .toStream()
                .foreach((page, counted) -> {});
        KafkaStreams streams = new KafkaStreams(builder.build(), said);
        Runtime.getRuntime().addShutdownHook(new Thread(() -> streams.close(Duration.ofSeconds(5))));
        streams.start();
    }

    /** A hash of 64 bits that spreads well enough for a sketch. */
    static long mixed(String text) {
        long h = 1125899906842597L;
        for (int i = 0; i < text.length(); i++) h = 31 * h + text.charAt(i);
        h ^= h >>> 33;
        h *= 0xff51afd7ed558ccdL;
        h ^= h >>> 33;
        h *= 0xc4ceb9fe1a85ec53L;
        return h ^ (h >>> 33);
    }

    static Serde<View> views() {
        Serializer<View> write = (topic, v) -> {
            try {
                return v == null ? null : JSON.writeValueAsBytes(JSON.createObjectNode().put("page", v.page())
                        .put("visitor_id", v.visitor()).put("millis", v.at()));
            } catch (IOException wrong) {
                throw new IllegalStateException(wrong);
            }
        };
        Deserializer<View> read = (topic, bytes) -> {
            try {
                JsonNode v = JSON.readTree(bytes);
                long at = v.has("millis") ? v.get("millis").asLong()
                        : OffsetDateTime.parse(v.get("viewed_at").asText()).toInstant().toEpochMilli();
                return new View(v.get("page").asText(), v.get("visitor_id").asText(), at);
            } catch (IOException | RuntimeException wrong) {
                return null;
            }
        };
        return Serdes.serdeFrom(write, read);
    }

    static Serde<Counted> counts() {
        Serializer<Counted> write = (topic, c) -> {
            if (c == null) return null;
            byte[] sketch = c.visitors().toBytes();
            return ByteBuffer.allocate(8 + sketch.length).putLong(c.pv()).put(sketch).array();
        };
        Deserializer<Counted> read = (topic, bytes) -> {
            if (bytes == null) return null;
            ByteBuffer from = ByteBuffer.wrap(bytes);
            long pv = from.getLong();
            byte[] sketch = new byte[from.remaining()];
            from.get(sketch);
            return new Counted(pv, HLL.fromBytes(sketch));
        };
        return Serdes.serdeFrom(write, read);
    }
}
