/* A fixed set of threads that work on one thing together. The thread that calls team_run is number 0 of them. */
#ifndef TEAM_H
#define TEAM_H

typedef struct Team Team;
typedef void (*Work)(void *context, int thread);

Team *team_new(int threads); /* NULL: the threads are not to be had */
void team_free(Team *t);
int team_size(const Team *t);
/* Run work(context, 0 .. size - 1) on all threads; returns when all are done. */
void team_run(Team *t, Work work, void *context);
/* Wait for all threads; what they did before is visible to all after. */
void team_meet(Team *t);
/* The first of the next `grain` items that nobody has taken since the last team_meet. */
int team_take(Team *t, int grain);

#endif
