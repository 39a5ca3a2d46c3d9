import java.io.BufferedReader;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.BufferedInputStream;
import java.io.ByteArrayOutputStream;
import java.io.EOFException;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.OutputStream;
import java.io.PrintStream;
import java.lang.reflect.Field;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.locks.ReentrantLock;
import language.model.ActionExpr;
import language.model.ActionExprOR;
import language.model.ActionRequestDef;
import language.model.ActionTrigger;
import main.scala.scienceworld.runtime.SimplifierProcessor$;
import scala.Option;
import scala.Tuple2;
import scala.Tuple3;
import scala.Tuple4;
import scienceworld.actions.Action;
import scienceworld.input.InputParser;
import scienceworld.input.InputParser$;
import scienceworld.objects.agent.Agent;
import scienceworld.runtime.AgentInterface;
import scienceworld.runtime.pythonapi.PythonInterface;
import scienceworld.struct.EnvObject;
import scienceworld.tasks.goals.GoalSequence;
import scienceworld.tasks.goals.ObjMonitor;
import util.UniqueIdentifier$;

/**
 * Serves any number of ScienceWorld episodes from one JVM, one episode a connection.
 *
 * The simulator keeps its random numbers, its counter of object ids and its simplifications in globals. Each
 * episode has its own, which are put in place before anything of that episode runs; one lock lets one run at a time.
 *
 * The process takes a token from its first line of input, prints its port, and ends when nobody has been connected
 * for a while. A connection is a stream of requests: length (int), operation (byte), text (UTF-8). See `answer` for
 * the operations and `State` for the usual reply.
 */
public final class ScienceWorldHost {
    private static final byte OK = 0;
    private static final byte REFUSED = 1;
    private static final byte FAULT = 2;
    private static final int MAX_REQUEST = 1 << 20;
    private static final long FIRST_GRACE_MS = 30_000;
    private static final String LOOK = "look around";
    private static final String RESET = "reset task";

    private static final ReentrantLock simulator = new ReentrantLock(true);
    private static final AtomicInteger connections = new AtomicInteger();
    private static volatile long idleSince = System.currentTimeMillis();
    private static volatile long busySince = 0;
    private static Field randomField;
    private static Field parserField;
    private static Slot active;
    private static final Random nobody = new Random(0);
    private static String simplifications = "";

    /** A request that cannot be done; the episode goes on. */
    private static final class Refused extends RuntimeException {
        private static final long serialVersionUID = 1L;

        Refused(String message) {
            super(message);
        }
    }

    /** What one episode owns. */
    private static final class Slot {
        final PythonInterface world = new PythonInterface();
        final Random random = new Random(0);
        final Random scratch = new Random(0);
        long ids;
        String simplifications = "";
        boolean loaded;
        // Through the simulator's own front, debugging and history included: the yardstick of tests.
        boolean plain;

        AgentInterface agent() {
            return world.agentInterface().get();
        }
    }

    public static void main(String[] args) throws Exception {
        final long graceMs = Long.parseLong(args[0]);
        final long longestCallMs = Long.parseLong(args[1]);
        byte[] token = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8))
            .readLine().getBytes(StandardCharsets.UTF_8);
        ServerSocket server = new ServerSocket(0, 256, InetAddress.getByAddress(new byte[] {127, 0, 0, 1}));
        System.out.println(server.getLocalPort());
        System.out.flush();
        // Before the first Scala class, which would keep the old stream.
        System.setOut(new PrintStream(OutputStream.nullOutputStream()));
        prepare();
        Thread watch = new Thread(() -> watch(graceMs, longestCallMs), "watch");
        watch.setDaemon(true);
        watch.start();
        while (true) {
            Socket socket = server.accept();
            connections.incrementAndGet();
            Thread thread = new Thread(() -> serve(socket, token), "episode");
            thread.setDaemon(true);
            thread.start();
        }
    }

    private static void watch(long graceMs, long longestCallMs) {
        long started = System.currentTimeMillis();
        boolean used = false;
        while (true) {
            try {
                Thread.sleep(100);
            } catch (InterruptedException e) {
                continue;
            }
            long now = System.currentTimeMillis();
            used |= connections.get() > 0;
            boolean idle = connections.get() == 0 && now - idleSince > graceMs;
            if (idle && (used || now - started > FIRST_GRACE_MS)) {
                Runtime.getRuntime().halt(0);
            }
            long since = busySince;
            if (since != 0 && now - since > longestCallMs) {
                Runtime.getRuntime().halt(3);
            }
        }
    }

    private static void prepare() throws Exception {
        randomField = scala.util.Random.class.getDeclaredField("self");
        randomField.setAccessible(true);
        parserField = AgentInterface.class.getDeclaredField("inputParser");
        parserField.setAccessible(true);
    }

    private static void serve(Socket socket, byte[] token) {
        try (Socket s = socket) {
            s.setTcpNoDelay(true);
            DataInputStream in = new DataInputStream(new BufferedInputStream(s.getInputStream()));
            DataOutputStream out = new DataOutputStream(s.getOutputStream());
            s.setSoTimeout(60_000);
            byte[] given = read(in);
            if (!MessageDigest.isEqual(given, token)) {
                return;
            }
            s.setSoTimeout(0);
            send(out, OK, text(Integer.toString(connections.get())));
            Episode episode = new Episode();
            try {
                while (true) {
                    byte[] request = read(in);
                    String argument = new String(request, 1, request.length - 1, StandardCharsets.UTF_8);
                    episode.answer((char) request[0], argument);
                    send(out, episode.status, episode.reply);
                }
            } finally {
                episode.forget();
            }
        } catch (IOException e) {
            // The other side is gone, and its episode with it.
        } finally {
            idleSince = System.currentTimeMillis();
            connections.decrementAndGet();
        }
    }

    /** The requests of one connection, answered under the lock. */
    private static final class Episode {
        private Slot slot;
        byte status;
        byte[] reply;

        void answer(char operation, String argument) {
            simulator.lock();
            busySince = System.currentTimeMillis();
            try {
                if (slot == null) {
                    // Making one draws random numbers and ids.
                    leave();
                    slot = new Slot();
                }
                reply = ScienceWorldHost.answer(slot, operation, argument);
                status = OK;
            } catch (Refused e) {
                reply = text(String.valueOf(e.getMessage()));
                status = REFUSED;
            } catch (Throwable e) {
                // The world may be half changed: it is given up, and its memory with it.
                reply = text(e.toString());
                status = FAULT;
                drop();
            } finally {
                busySince = 0;
                simulator.unlock();
            }
        }

        void forget() {
            simulator.lock();
            try {
                drop();
            } finally {
                simulator.unlock();
            }
        }

        private void drop() {
            if (active == slot) {
                leave();
            }
            slot = null;
        }
    }

    /**
     * L task, variation, simplifications, way: load and look around. S action: one turn. V: the valid actions, one a
     * line. G as L: a gold path, one action a line, after its final score. T: every task and its variations.
     */
    private static byte[] answer(Slot slot, char operation, String argument) throws Exception {
        switch (operation) {
            case 'L':
                return load(slot, argument.split("\n", -1));
            case 'S':
                enter(slot);
                return state(slot, turn(slot, argument), false);
            case 'V':
                enter(slot);
                return text(undisturbed(slot, () -> validActions(slot)));
            case 'G':
                return text(gold(slot, argument.split("\n", -1)));
            case 'T':
                return text(tasks());
            default:
                throw new Refused("unknown operation " + (int) operation);
        }
    }

    // The episode's own globals.

    private static void random(Random random) {
        try {
            randomField.set(scala.util.Random$.MODULE$, random);
        } catch (IllegalAccessException e) {
            throw new IllegalStateException(e);
        }
    }

    private static void leave() {
        if (active != null) {
            active.ids = UniqueIdentifier$.MODULE$.count();
        }
        active = null;
        random(nobody);
    }

    private static void enter(Slot slot) throws Exception {
        if (!slot.loaded) {
            throw new Refused("no task was loaded");
        }
        swap(slot);
    }

    private static void swap(Slot slot) throws Exception {
        if (active != slot) {
            leave();
            UniqueIdentifier$.MODULE$.count_$eq(slot.ids);
            random(slot.random);
            active = slot;
        }
        if (!slot.simplifications.equals(simplifications)) {
            SimplifierProcessor$.MODULE$.parseSimplificationStr(slot.simplifications);
            simplifications = slot.simplifications;
        }
    }

    private interface Reading {
        String read() throws Exception;
    }

    /** Read something whose computation draws random numbers, without drawing from the world's. */
    private static String undisturbed(Slot slot, Reading reading) throws Exception {
        slot.scratch.setSeed(0);
        random(slot.scratch);
        try {
            return reading.read();
        } finally {
            random(slot.random);
        }
    }

    // What an episode does.

    private static void build(Slot slot, String task, int variation, String simplification, boolean gold)
        throws Exception {
        slot.loaded = false;
        swap(slot);
        PythonInterface world = slot.world;
        // All three outlive a load otherwise.
        world.goldPathGenerationEnabled_$eq(false);
        world.score_$eq(0);
        world.isComplete_$eq(false);
        String error = world.load(task, variation, simplification, gold);
        if (!error.isEmpty()) {
            simplifications = "?";
            throw new Refused(error);
        }
        world.goldPathGenerationEnabled_$eq(false);
        slot.simplifications = slot.agent().simplificationStr();
        simplifications = slot.simplifications;
        if (!slot.plain) {
            // Needed by another load only, which makes a new one: thirty tasks' worth of objects.
            world.taskMaker_$eq(null);
            parserField.set(slot.agent(), new Parser(slot.agent().actionHandler().getActions()));
        }
        slot.loaded = true;
    }

    private static byte[] load(Slot slot, String[] fields) throws Exception {
        slot.plain = fields[3].equals("plain");
        build(slot, fields[0], Integer.parseInt(fields[1]), fields[2], false);
        return state(slot, turn(slot, LOOK), true);
    }

    private static String turn(Slot slot, String action) {
        if (slot.plain) {
            return slot.world.step(action);
        }
        AgentInterface agent = slot.agent();
        String word = action.trim().toLowerCase();
        if (word.equals("help")) {
            return "Possible actions: \n\t" + String.join("\n\t", templates(slot));
        }
        if (word.equals("objects") || word.equals("task")) {
            return slot.world.step(action);
        }
        Tuple3<String, Object, Object> result = agent.step(action);
        slot.world.score_$eq((Double) result._2());
        slot.world.isComplete_$eq((Boolean) result._3());
        return result._1().isEmpty()
            ? "Unknown action.  Type 'help' for a list of actions, and 'objects' for a list of possible object referents. "
            : result._1();
    }

    private static List<String> templates(Slot slot) {
        List<String> found = new ArrayList<>();
        for (String template : slot.agent().getPossibleActions()) {
            if (!template.equals(RESET)) {
                found.add(template);
            }
        }
        return found;
    }

    private static String validActions(Slot slot) {
        List<String> found = new ArrayList<>();
        for (String action : slot.world.getValidActionObjectCombinations()) {
            if (!action.equals(RESET)) {
                found.add(action);
            }
        }
        return String.join("\n", found);
    }

    /** The simulator's gold path up to the action that ends the task, on a line each, after the score it ends with. */
    private static String gold(Slot slot, String[] fields) throws Exception {
        int variation = Integer.parseInt(fields[1]);
        build(slot, fields[0], variation, fields[2], true);
        List<String> path = new ArrayList<>(slot.world.getGoldActionSequence());
        build(slot, fields[0], variation, fields[2], false);
        turn(slot, LOOK);
        StringBuilder used = new StringBuilder();
        for (String action : path) {
            turn(slot, action);
            used.append('\n').append(action);
            if (slot.world.isComplete() || slot.world.score() < 0) {
                break;
            }
        }
        return slot.world.score() + used.toString();
    }

    private static String tasks() {
        leave();
        StringBuilder out = new StringBuilder();
        scienceworld.tasks.TaskMaker1 maker = new scienceworld.tasks.TaskMaker1();
        for (String task : maker.getTaskList()) {
            out.append(task).append(' ').append(maker.getMaxVariations(task)).append('\n');
        }
        return out.toString();
    }

    /**
     * Score (double), moves (int), options of an open question (int), flags (byte: 1 completed, 2 broken), then texts:
     * observation, visible objects a line each, and after a load the task in words and the action templates.
     */
    private static byte[] state(Slot slot, String observation, boolean loaded) throws Exception {
        AgentInterface agent = slot.agent();
        ByteArrayOutputStream bytes = new ByteArrayOutputStream(4096);
        DataOutputStream out = new DataOutputStream(bytes);
        boolean broken = agent.isInErrorState();
        out.writeDouble(slot.world.score());
        out.writeInt(agent.getCurIterations());
        out.writeInt(agent.inputParser().getNumAmbiguousMatches());
        out.writeByte((slot.world.isComplete() ? 1 : 0) | (broken ? 2 : 0));
        write(out, broken ? agent.getErrorStateMessage() : observation);
        write(out, broken ? "" : undisturbed(slot, () -> String.join("\n", agent.getPossibleObjects())));
        if (loaded) {
            write(out, agent.getTaskDescription());
            write(out, String.join("\n", templates(slot)));
        }
        return bytes.toByteArray();
    }

    /** The simulator's parser without `reset task`, and without reading every object's names again for every action. */
    private static final class Parser extends InputParser {
        private static final int MOST_NAMES = 20_000;
        private static final Map<String, String> PLAIN = new HashMap<>();
        private final List<String> farOpenings;
        private final EnvObject[][] lists = new EnvObject[2][];
        private final String[][][] names = new String[2][][];

        Parser(ActionRequestDef[] actions) {
            super(withoutReset(actions));
            farOpenings = openings(actions);
        }

        /** What actions that reach into other rooms begin with; the empty text where that could be anything. */
        private static List<String> openings(ActionRequestDef[] actions) {
            List<String> found = new ArrayList<>();
            for (ActionRequestDef action : actions) {
                if (!action.isOracleAction()) {
                    continue;
                }
                scala.collection.Iterator<ActionTrigger> each = action.triggers().iterator();
                while (each.hasNext()) {
                    ActionExpr first = each.next().pattern().head();
                    if (first instanceof ActionExprOR) {
                        scala.collection.Iterator<String> words = ((ActionExprOR) first).orElements().iterator();
                        while (words.hasNext()) {
                            found.add(words.next());
                        }
                    } else {
                        found.add("");
                    }
                }
            }
            return found;
        }

        private boolean mayReachFar(String words) {
            for (String opening : farOpenings) {
                if (words.startsWith(opening)) {
                    return true;
                }
            }
            return false;
        }

        private static ActionRequestDef[] withoutReset(ActionRequestDef[] actions) {
            List<ActionRequestDef> kept = new ArrayList<>();
            for (ActionRequestDef action : actions) {
                if (!action.name().equals(RESET)) {
                    kept.add(action);
                }
            }
            if (kept.size() != actions.length - 1) {
                throw new IllegalStateException("the simulator has no action named " + RESET);
            }
            return kept.toArray(new ActionRequestDef[0]);
        }

        @Override
        public Tuple4<Object, String, String, Option<Action>> parse(
            String input, EnvObject visible, EnvObject universe, Agent agent, ObjMonitor monitor,
            GoalSequence goals, EnvObject perspective) {
            // The whole building is searched for things in any room, which few actions can name: when none of them
            // can be meant, the agent's pockets do as well and cost nothing.
            String words = String.join(" ", InputParser$.MODULE$.tokenize(input.toLowerCase()));
            EnvObject searched = mayReachFar(words) ? universe : agent;
            try {
                return super.parse(input, visible, searched, agent, monitor, goals, perspective);
            } finally {
                forget();
            }
        }

        private void forget() {
            for (int i = 0; i < lists.length; i++) {
                lists[i] = null;
                names[i] = null;
            }
        }

        private String[][] namesOf(EnvObject[] objects, EnvObject perspective) {
            int free = -1;
            for (int i = 0; i < lists.length; i++) {
                if (lists[i] == objects) {
                    return names[i];
                }
                free = lists[i] == null && free < 0 ? i : free;
            }
            String[][] found = new String[objects.length][];
            for (int i = 0; i < objects.length; i++) {
                found[i] = namesOf(objects[i], perspective);
            }
            if (free >= 0) {
                lists[free] = objects;
                names[free] = found;
            }
            return found;
        }

        /** `InputParser.getObjectReferents`, in its order, with the words of each name remembered. */
        private static String[] namesOf(EnvObject object, EnvObject perspective) {
            scala.collection.immutable.Set<String> names = object.getReferentsWithContainers(perspective);
            String[] found = new String[names.size()];
            scala.collection.Iterator<String> each = names.iterator();
            for (int i = 0; i < found.length; i++) {
                String name = each.next();
                // Lower case would make another set of them, in an order of its own.
                if (!name.equals(name.toLowerCase())) {
                    return InputParser$.MODULE$.getObjectReferents(object, perspective);
                }
                String plain = PLAIN.get(name);
                if (plain == null) {
                    plain = String.join(" ", InputParser$.MODULE$.tokenize(name));
                    if (PLAIN.size() >= MOST_NAMES) {
                        PLAIN.clear();
                    }
                    PLAIN.put(name, plain);
                }
                found[i] = plain;
            }
            return found;
        }

        @Override
        @SuppressWarnings("unchecked")
        public Tuple2<Object, Tuple2<String, EnvObject>[]> matchObj(
            String input, EnvObject[] objects, EnvObject perspective) {
            String[][] known = namesOf(objects, perspective);
            List<Tuple2<String, EnvObject>> found = new ArrayList<>();
            for (int i = 0; i < objects.length; i++) {
                for (String name : known[i]) {
                    if (input.startsWith(name)) {
                        found.add(new Tuple2<>(input.substring(name.length()).trim(), objects[i]));
                    }
                }
            }
            return new Tuple2<>(!found.isEmpty(), found.toArray((Tuple2<String, EnvObject>[]) new Tuple2[0]));
        }
    }

    // Frames.

    private static byte[] read(DataInputStream in) throws IOException {
        int length = in.readInt();
        if (length < 1 || length > MAX_REQUEST) {
            throw new EOFException("a request of " + length + " bytes");
        }
        byte[] body = new byte[length];
        in.readFully(body);
        return body;
    }

    private static void send(DataOutputStream out, byte status, byte[] body) throws IOException {
        ByteArrayOutputStream bytes = new ByteArrayOutputStream(body.length + 5);
        DataOutputStream frame = new DataOutputStream(bytes);
        frame.writeInt(body.length + 1);
        frame.writeByte(status);
        frame.write(body);
        out.write(bytes.toByteArray());
        out.flush();
    }

    private static byte[] text(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    private static void write(DataOutputStream out, String text) throws IOException {
        byte[] bytes = text(text);
        out.writeInt(bytes.length);
        out.write(bytes);
    }
}
